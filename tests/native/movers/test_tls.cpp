// TLS sessions over socket pairs: every byte arrives once and in order whatever the socket takes at a time; who is not one
// of us is refused, with the reason at both ends; files that do not belong together are refused by name.
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <functional>
#include <thread>

#include "../check.hpp"
#include "net.hpp"
#include "tls.hpp"
#include "wire.hpp"

using namespace kvdir;
using namespace kvdir::tls;

namespace {

std::string file(const std::string& name) { return std::string(CERTIFICATES "/") + name; }
Files files(const std::string& node, const std::string& ca = "ca") {
    return {file(node + ".pem"), file(node + ".key"), file(ca + ".pem")};
}
std::shared_ptr<const Context> context(const std::string& node, const std::string& ca = "ca") {
    return std::make_shared<Context>(files(node, ca));
}

// The message of the exception that `body` throws.
std::string refusal_of(const std::function<void()>& body) {
    try {
        body();
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    return "";
}
bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

struct Pair {
    Fd left, right;
    explicit Pair(int buffer_bytes = 0) {
        int fds[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds) == 0);
        left = Fd(fds[0]);
        right = Fd(fds[1]);
        for (const int fd : fds)
            if (buffer_bytes != 0) CHECK(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes) == 0);
    }
};

// Both ends of one connection, driven by one thread: neither call ever waits.
struct Link {
    Pair pair;
    Session client, server;

    explicit Link(int buffer_bytes = 0, uint64_t rekey_bytes = kRekeyBytes)
        : Link(context("node"), context("other"), buffer_bytes, rekey_bytes) {}
    Link(std::shared_ptr<const Context> ours, std::shared_ptr<const Context> theirs, int buffer_bytes = 0,
         uint64_t rekey_bytes = kRekeyBytes)
        : pair(buffer_bytes),
          client(std::move(ours), Side::CLIENT, pair.left.get(), rekey_bytes),
          server(std::move(theirs), Side::SERVER, pair.right.get(), rekey_bytes) {}

    // Until both are done or one is closed.
    bool shake_hands() {
        bool c = false, s = false;
        for (int round = 0; round < 1000 && !(c && s); ++round) {
            Pause why{};
            if (!c && !(c = client.handshake(&why)) && why == Pause::CLOSED) return false;
            if (!s && !(s = server.handshake(&why)) && why == Pause::CLOSED) return false;
        }
        CHECK(c && s);
        return true;
    }
};

struct Stream {
    std::vector<uint8_t> bytes;
    std::vector<uint8_t> arrived;
    IoList out, in;

    explicit Stream(size_t count) : bytes(count), arrived(count) {
        for (auto& byte : bytes) byte = static_cast<uint8_t>(random_bits()());
        cut(out, bytes);
        cut(in, arrived);
    }
    // Into pieces of every kind: tiny, around a record, larger than a chunk.
    static void cut(IoList& list, std::vector<uint8_t>& whole) {
        for (size_t at = 0; at < whole.size();) {
            const size_t limits[] = {200, 20000, 300000};
            const size_t part = std::min<size_t>(1 + below(limits[below(3)]), whole.size() - at);
            list.add(whole.data() + at, part);
            at += part;
        }
    }
    void move(Session& from, Session& to) {
        Pause why{};
        if (!out.done()) {
            const size_t n = from.write(out.parts(), out.count(), &why);
            CHECK(n != 0 || why == Pause::WANT_WRITE);
            out.advance(n);
        }
        if (in.done()) return;
        const size_t n = to.read(in.parts(), 1 + below(in.count()), &why);
        CHECK(n != 0 || why == Pause::WANT_READ);
        in.advance(n);
    }
    bool done() const { return in.done(); }
};

void send_both_ways(Link& link, size_t bytes) {
    CHECK(link.shake_hands());
    Stream there(bytes), back(bytes / 3);
    while (!there.done() || !back.done()) {
        there.move(link.client, link.server);
        back.move(link.server, link.client);
    }
    CHECK(there.bytes == there.arrived && back.bytes == back.arrived);
    CHECK(!link.server.has_pending() && !link.client.has_pending());
}

// What a session says when it is driven until it closes, fed with whatever lies in its socket.
Refusal end_of(Session& session) {
    uint8_t byte;
    const iovec part{&byte, 1};
    for (int round = 0; round < 1000; ++round) {
        Pause why{};
        const bool shaken = session.handshake(&why);
        if (shaken && session.read(&part, 1, &why) != 0) continue;
        if (why == Pause::CLOSED) {
            CHECK(!session.reason().empty());
            return session.refusal();
        }
    }
    CHECK(false);
    return Refusal::NONE;
}

void copy_file(const std::string& from, const std::string& to) {
    std::ofstream(to + ".new") << std::ifstream(from).rdbuf();
    CHECK(std::rename((to + ".new").c_str(), to.c_str()) == 0);
}

}  // namespace

TEST(every_byte_arrives_in_order) {
    for (int i = 0; i < 8; ++i) {
        Link link;
        send_both_ways(link, 1 + below(4 << 20));
    }
}

TEST(every_byte_arrives_in_order_through_a_tiny_socket_buffer) {
    Link link(4096);
    send_both_ways(link, 1 << 20);
}

TEST(keys_change_and_no_byte_is_lost) {
    Link link(0, 50000);
    send_both_ways(link, 3 << 20);
}

TEST(write_reports_bytes_only_when_the_socket_has_them) {
    Link link(4096);
    CHECK(link.shake_hands());
    std::vector<uint8_t> data(kChunkBytes, 7), arrived(kChunkBytes);
    const iovec out{data.data(), data.size()};
    Pause why{};
    CHECK(link.client.write(&out, 1, &why) == 0 && why == Pause::WANT_WRITE);
    size_t reported = 0, read = 0;
    while (reported == 0) {
        const iovec in{arrived.data() + read, arrived.size() - read};
        read += link.server.read(&in, 1, &why);
        reported = link.client.write(&out, 1, &why);
    }
    CHECK(reported == data.size());
    while (read < data.size()) {  // nothing more is sent: it has been handed over
        const iovec in{arrived.data() + read, arrived.size() - read};
        const size_t n = link.server.read(&in, 1, &why);
        CHECK(n != 0);
        read += n;
    }
    CHECK(arrived == data);
}

TEST(peers_of_another_ca_are_refused_with_the_reason_at_both_ends) {
    Link link(context("node"), context("foreign", "foreign-ca"));
    CHECK(!link.shake_hands());
    CHECK(link.client.refusal() == Refusal::UNTRUSTED);
    CHECK(contains(link.client.reason(), "peer's certificate is refused"));
    CHECK(end_of(link.server) == Refusal::BY_PEER);
    CHECK(contains(link.server.reason(), "data_tls_ca"));
}

TEST(clients_that_may_only_be_clients_are_refused_at_start) {
    CHECK(contains(refusal_of([] { context("client"); }), "allowed as TLS server and client"));
}

TEST(plaintext_is_recognized_at_both_ends) {
    for (const Side side : {Side::SERVER, Side::CLIENT}) {
        Pair pair;
        wire::Hello hello{};
        hello.magic = wire::kHelloMagic;
        CHECK(send(pair.left.get(), &hello, sizeof hello, 0) == sizeof hello);
        Session session(context("node"), side, pair.right.get());
        CHECK(end_of(session) == Refusal::NOT_TLS);
        CHECK(contains(session.reason(), "does not speak TLS"));
    }
}

TEST(garbage_never_passes_for_a_handshake) {
    for (int i = 0; i < 500; ++i) {
        Pair pair;
        std::vector<uint8_t> noise(1 + below(2000));
        for (auto& byte : noise) byte = static_cast<uint8_t>(random_bits()());
        if (below(2) == 0) noise[0] = 22;  // a handshake record, as it seems
        if (below(2) == 0 && noise.size() > 2) noise[1] = noise[2] = 3;
        CHECK(send(pair.left.get(), noise.data(), noise.size(), 0) == static_cast<ssize_t>(noise.size()));
        pair.left.reset();
        Session session(context("node"), below(2) == 0 ? Side::SERVER : Side::CLIENT, pair.right.get());
        CHECK(end_of(session) != Refusal::UNTRUSTED);
    }
}

TEST(flipped_bits_end_the_session_and_never_become_data) {
    for (int i = 0; i < 50; ++i) {
        Link link;
        CHECK(link.shake_hands());
        std::vector<uint8_t> data(5000, 9), arrived(5000, 0);
        const iovec out{data.data(), data.size()}, in{arrived.data(), arrived.size()};
        Pause why{};
        CHECK(link.client.write(&out, 1, &why) == data.size());
        std::vector<uint8_t> record(8000);
        const ssize_t bytes = recv(link.pair.right.get(), record.data(), record.size(), 0);
        CHECK(bytes > 5000);
        record[5 + below(static_cast<uint64_t>(bytes) - 5)] ^= static_cast<uint8_t>(1 << below(8));  // behind the record's header
        CHECK(send(link.pair.left.get(), record.data(), static_cast<size_t>(bytes), 0) == bytes);
        CHECK(link.server.read(&in, 1, &why) == 0 && why == Pause::CLOSED);
        CHECK(link.server.refusal() == Refusal::BROKEN);
        CHECK(arrived == std::vector<uint8_t>(5000, 0));
    }
}

TEST(a_closed_peer_is_an_end_and_no_signal) {
    Link link;
    CHECK(link.shake_hands());
    link.pair.right.reset();
    std::vector<uint8_t> data(kChunkBytes, 1);
    const iovec out{data.data(), data.size()};
    Pause why{};
    CHECK(link.client.write(&out, 1, &why) == 0 && why == Pause::CLOSED);
    CHECK(link.client.refusal() == Refusal::NONE && contains(link.client.reason(), "connection lost"));
    const iovec in{data.data(), data.size()};
    CHECK(link.client.read(&in, 1, &why) == 0 && why == Pause::CLOSED);
}

TEST(files_that_do_not_fit_are_refused_by_name) {
    const auto says = [](const Files& wrong, const char* setting, const char* why) {
        const std::string text = refusal_of([&] { Credentials made(wrong); });
        CHECK(contains(text, setting) && contains(text, why));
    };
    says({file("nowhere.pem"), file("node.key"), file("ca.pem")}, "data_tls_cert", "No such file");
    says({file("node.pem"), file("nowhere.key"), file("ca.pem")}, "data_tls_key", "No such file");
    says({file("node.pem"), file("node.key"), file("nowhere.pem")}, "data_tls_ca", "No such file");
    says({file("node.pem"), file("other.key"), file("ca.pem")}, "data_tls_key", "not the key");
    says({file("node.pem"), file("node-encrypted.key"), file("ca.pem")}, "data_tls_key", "not encrypted");
    says({file("node.key"), file("node.key"), file("ca.pem")}, "data_tls_cert", "no PEM certificate");
    says({file("node.pem"), file("node.key"), file("node.key")}, "data_tls_ca", "no PEM certificate");
    says({file("expired.pem"), file("expired.key"), file("ca.pem")}, "data_tls_cert", "expired");
    says({file("foreign.pem"), file("foreign.key"), file("ca.pem")}, "data_tls_cert", "issuer");
}

TEST(new_files_are_used_and_broken_ones_leave_the_old) {
    const Files mine{file("rotating.pem"), file("rotating.key"), file("ca.pem")};
    copy_file(file("node.pem"), mine.certificate);
    copy_file(file("node.key"), mine.key);
    Credentials credentials(mine, 0);
    const auto first = credentials.current();
    CHECK(first == credentials.current() && credentials.stats().reloads == 0);

    copy_file(file("other.pem"), mine.certificate);  // half way: a certificate without its key
    CHECK(credentials.current() == first);
    CHECK(credentials.stats().failed_reloads == 1 && contains(credentials.stats().failure, "data_tls_key"));

    copy_file(file("other.key"), mine.key);
    CHECK(credentials.current() != first);
    const CredentialStats stats = credentials.stats();
    CHECK(stats.reloads == 1 && stats.failure.empty() && stats.expires_unix_s > 0);
}

TEST(missing_library_says_what_to_install) {
    const std::string text = refusal_of([] { openssl::load("libssl-nowhere.so.3", openssl::kCryptoName); });
    CHECK(contains(text, "install libssl3") && contains(text, "libssl-nowhere.so.3"));
}

TEST(sessions_of_many_threads_share_a_context) {
    const auto ours = context("node"), theirs = context("other");
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
        threads.emplace_back([&] {
            for (int round = 0; round < 10; ++round) {
                Link link(ours, theirs);
                CHECK(link.shake_hands());
            }
        });
    for (auto& thread : threads) thread.join();
}
