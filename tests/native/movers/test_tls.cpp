// TLS streams over socket pairs: every byte arrives once and in order whatever the socket takes at a time; who is not one
// of us is refused, with the reason at both ends; files that do not belong together are refused by name.
#include <dlfcn.h>
#include <sys/socket.h>
#include <unistd.h>

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
    std::shared_ptr<Counts> counts = std::make_shared<Counts>();  // of the server
    Fd left, right;                                               // copies of the streams' descriptors
    std::unique_ptr<Stream> client, server;

    explicit Link(int buffer_bytes = 0, uint64_t rekey_records = kRekeyRecords)
        : Link(context("node"), context("other"), buffer_bytes, rekey_records) {}
    Link(std::shared_ptr<const Context> ours, std::shared_ptr<const Context> theirs, int buffer_bytes = 0,
         uint64_t rekey_records = kRekeyRecords) {
        Pair pair(buffer_bytes);
        left = Fd(dup(pair.left.get()));
        right = Fd(dup(pair.right.get()));
        client = tls_stream(std::move(pair.left), Side::CLIENT, std::move(ours), nullptr, rekey_records);
        server = tls_stream(std::move(pair.right), Side::SERVER, std::move(theirs), counts, rekey_records);
    }

    // Until both are done or one is closed.
    bool shake_hands() {
        Io c = Io::WANT_READ, s = Io::WANT_READ;
        for (int round = 0; round < 1000 && !(c == Io::MOVED && s == Io::MOVED); ++round) {
            if (c != Io::MOVED) c = client->handshake();
            if (s != Io::MOVED) s = server->handshake();
            if (c == Io::CLOSED || s == Io::CLOSED) return false;
        }
        CHECK(c == Io::MOVED && s == Io::MOVED);
        return true;
    }
};

struct Load {
    std::vector<uint8_t> bytes;
    std::vector<uint8_t> arrived;
    IoList out, in;

    explicit Load(size_t count) : bytes(count), arrived(count) {
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
    void move(Stream& from, Stream& to) {
        if (!out.done()) {
            const Moved moved = from.writev(out.parts(), out.count());
            CHECK(moved.io == Io::MOVED || moved.io == Io::WANT_WRITE);
            out.advance(moved.bytes);
        }
        if (in.done()) return;
        const Moved moved = to.readv(in.parts(), 1 + below(in.count()));
        CHECK(moved.io == Io::MOVED || moved.io == Io::WANT_READ);
        in.advance(moved.bytes);
    }
    bool done() const { return in.done(); }
};

void send_both_ways(Link& link, size_t bytes) {
    CHECK(link.shake_hands());
    Load there(bytes), back(bytes / 3);
    while (!there.done() || !back.done()) {
        there.move(*link.client, *link.server);
        back.move(*link.server, *link.client);
    }
    CHECK(there.bytes == there.arrived && back.bytes == back.arrived);
}

// Why a stream closes that is driven with whatever lies in its socket.
std::string end_of(Stream& stream) {
    uint8_t byte;
    const iovec part{&byte, 1};
    for (int round = 0; round < 1000; ++round) {
        Io io = stream.handshake();
        if (io == Io::MOVED) io = stream.readv(&part, 1).io;
        if (io == Io::CLOSED) return stream.reason();
    }
    CHECK(false);
    return "";
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
    Link link(0, 3);
    send_both_ways(link, 3 << 20);
}

TEST(write_counts_bytes_only_when_the_socket_has_them) {
    Link link(4096);
    CHECK(link.shake_hands());
    std::vector<uint8_t> data(kChunkBytes, 7), arrived(kChunkBytes);
    const iovec out{data.data(), data.size()};
    CHECK(link.client->writev(&out, 1).io == Io::WANT_WRITE);
    size_t counted = 0, read = 0;
    while (counted == 0) {
        const iovec in{arrived.data() + read, arrived.size() - read};
        read += link.server->readv(&in, 1).bytes;
        counted = link.client->writev(&out, 1).bytes;
    }
    CHECK(counted == data.size());
    while (read < data.size()) {  // nothing more is sent: it has been handed over
        const iovec in{arrived.data() + read, arrived.size() - read};
        const Moved moved = link.server->readv(&in, 1);
        CHECK(moved.io == Io::MOVED);
        read += moved.bytes;
    }
    CHECK(arrived == data);
}

TEST(plaintext_was_copied_when_a_write_could_not_go_on) {
    Link link(4096);
    CHECK(link.shake_hands());
    std::vector<uint8_t> data(kChunkBytes, 7), arrived(kChunkBytes);
    const iovec out{data.data(), data.size()};
    CHECK(link.client->writev(&out, 1).io == Io::WANT_WRITE);
    data.assign(data.size(), 8);  // what has been encrypted stays as it was
    for (size_t read = 0; read < arrived.size();) {
        const iovec in{arrived.data() + read, arrived.size() - read};
        read += link.server->readv(&in, 1).bytes;
        CHECK(link.client->writev(&out, 1).io != Io::CLOSED);
    }
    CHECK(arrived == std::vector<uint8_t>(kChunkBytes, 7));
}

TEST(peers_of_another_ca_are_refused_with_the_reason_at_both_ends) {
    Link link(context("node"), context("foreign", "foreign-ca"));
    CHECK(!link.shake_hands());
    CHECK(contains(link.client->reason(), "peer's certificate is refused"));
    CHECK(contains(end_of(*link.server), "data_tls_ca"));
    CHECK(link.counts->refused_us == 1 && link.counts->done == 0 && link.counts->unfinished == 0);
}

TEST(plaintext_is_recognized_at_both_ends) {
    for (const Side side : {Side::SERVER, Side::CLIENT}) {
        Pair pair;
        wire::Hello hello{};
        hello.magic = wire::kHelloMagic;
        CHECK(send(pair.left.get(), &hello, sizeof hello, 0) == sizeof hello);
        const auto counts = std::make_shared<Counts>();
        const auto stream = tls_stream(std::move(pair.right), side, context("node"), counts);
        CHECK(contains(end_of(*stream), "does not speak TLS"));
        CHECK(counts->not_tls == 1);
        uint8_t answer[600];
        const ssize_t bytes = recv(pair.left.get(), answer, sizeof answer, 0);
        CHECK(bytes > 6 && answer[0] == (side == Side::SERVER ? 21 : 22));  // an alert; a ClientHello
    }
}

TEST(who_leaves_during_the_handshake_is_counted) {
    const auto counts = std::make_shared<Counts>();
    Pair first, second;
    {
        const auto stream = tls_stream(std::move(first.right), Side::SERVER, context("node"), counts);
        CHECK(stream->handshake() == Io::WANT_READ);
    }
    CHECK(counts->unfinished == 1);
    second.left.reset();
    CHECK(contains(end_of(*tls_stream(std::move(second.right), Side::SERVER, context("node"), counts)), "closed by the peer"));
    CHECK(counts->unfinished == 2 && counts->broken == 0);
}

TEST(garbage_never_passes_for_a_handshake) {
    const auto ours = context("node");
    for (int i = 0; i < 500; ++i) {
        Pair pair;
        std::vector<uint8_t> noise(1 + below(2000));
        for (auto& byte : noise) byte = static_cast<uint8_t>(random_bits()());
        if (below(2) == 0) noise[0] = 22;  // a handshake record, as it seems
        if (below(2) == 0 && noise.size() > 2) noise[1] = noise[2] = 3;
        CHECK(send(pair.left.get(), noise.data(), noise.size(), 0) == static_cast<ssize_t>(noise.size()));
        pair.left.reset();
        const auto counts = std::make_shared<Counts>();
        CHECK(!end_of(*tls_stream(std::move(pair.right), below(2) == 0 ? Side::SERVER : Side::CLIENT, ours, counts)).empty());
        CHECK(counts->done == 0);
    }
}

TEST(flipped_bits_end_the_stream_and_never_become_data) {
    for (int i = 0; i < 50; ++i) {
        Link link;
        CHECK(link.shake_hands());
        std::vector<uint8_t> data(5000, 9), arrived(5000, 0);
        const iovec out{data.data(), data.size()}, in{arrived.data(), arrived.size()};
        CHECK(link.client->writev(&out, 1).bytes == data.size());
        std::vector<uint8_t> record(8000);
        const ssize_t bytes = recv(link.right.get(), record.data(), record.size(), 0);
        CHECK(bytes > 5000);
        record[5 + below(static_cast<uint64_t>(bytes) - 5)] ^= static_cast<uint8_t>(1 << below(8));  // behind the record's header
        CHECK(send(link.left.get(), record.data(), static_cast<size_t>(bytes), 0) == bytes);
        CHECK(link.server->readv(&in, 1).io == Io::CLOSED);
        CHECK(link.counts->broken == 1);
        CHECK(arrived == std::vector<uint8_t>(5000, 0));
    }
}

TEST(a_peer_that_changes_keys_for_ever_is_closed) {
    const openssl::Library& lib = openssl::library();
    const auto set_fd = reinterpret_cast<int (*)(openssl::Ssl*, int)>(dlsym(dlopen(openssl::kSslName, RTLD_NOW), "SSL_set_fd"));
    const auto ours = context("node");
    Pair pair;
    const std::unique_ptr<openssl::Ssl, void (*)(openssl::Ssl*)> peer(lib.SSL_new(ours->get()), lib.SSL_free);
    CHECK(set_fd(peer.get(), pair.left.get()) == 1);
    lib.SSL_set_connect_state(peer.get());
    const auto counts = std::make_shared<Counts>();
    const auto stream = tls_stream(std::move(pair.right), Side::SERVER, ours, counts);
    Io io = Io::WANT_READ;
    for (int shaken = 0; shaken != 1 || io != Io::MOVED; io = stream->handshake()) shaken = lib.SSL_do_handshake(peer.get());
    uint8_t byte;
    const iovec part{&byte, 1};
    for (int updates = 0; io != Io::CLOSED; ++updates) {
        CHECK(updates < 10000);
        CHECK(lib.SSL_key_update(peer.get(), openssl::kKeyUpdateNotRequested) == 1 && lib.SSL_do_handshake(peer.get()) == 1);
        io = stream->readv(&part, 1).io;
    }
    CHECK(contains(stream->reason(), "hardly any data") && counts->broken == 1);
}

TEST(a_closed_peer_is_an_end_and_no_signal) {
    Link link;
    CHECK(link.shake_hands());
    link.server.reset();
    link.right.reset();
    CHECK(link.counts->unfinished == 0);
    std::vector<uint8_t> data(kChunkBytes, 1);
    const iovec part{data.data(), data.size()};
    CHECK(link.client->writev(&part, 1).io == Io::CLOSED);
    CHECK(contains(link.client->reason(), "connection lost"));
    CHECK(link.client->readv(&part, 1).io == Io::CLOSED);
}

TEST(clients_that_may_only_be_clients_are_refused_at_start) {
    CHECK(contains(refusal_of([] { context("client"); }), "allowed as TLS server and client"));
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

TEST(streams_of_many_threads_share_a_context) {
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
