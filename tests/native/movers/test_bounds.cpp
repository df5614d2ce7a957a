// What peers can make us allocate: counted, while they send all they can think of. The bounds are those of the headers.
#include <malloc.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <new>

#include "arena.hpp"
#include "clock.hpp"
#include "tcp_reading.hpp"
#include "tcp_server.hpp"

namespace {
std::atomic<size_t> live{0}, peak{0};

void* counted(void* made) {
    if (made == nullptr) throw std::bad_alloc();
    const size_t now = live += malloc_usable_size(made);
    size_t seen = peak;
    while (seen < now && !peak.compare_exchange_weak(seen, now)) {
    }
    return made;
}

void forget(void* made) {
    if (made != nullptr) live -= malloc_usable_size(made);
    std::free(made);
}
}  // namespace

void* operator new(size_t bytes) { return counted(std::malloc(bytes)); }
void operator delete(void* made) noexcept { forget(made); }
void operator delete(void* made, size_t) noexcept { forget(made); }

using namespace kvdir;

namespace {

constexpr uint64_t kEpoch = 9;
constexpr const char* kHost = "127.0.0.1";

uint64_t soon(uint64_t ms = 20000) { return now_ns() + ms * 1000000ULL; }

template <typename T>
void append(std::vector<uint8_t>& data, const T& value) {
    const auto* from = reinterpret_cast<const uint8_t*>(&value);
    data.insert(data.end(), from, from + sizeof value);
}

std::vector<uint8_t> hello() {
    std::vector<uint8_t> data;
    append(data, wire::Hello{wire::kHelloMagic, wire::kVersion, kEpoch, wire::kMaxRequestBlocks, {}});
    return data;
}

// As many blocks as one request may have, of any kind.
std::vector<uint8_t> longest_request(const std::vector<Record>& records) {
    std::vector<uint8_t> data;
    append(data, wire::Request{wire::kRequestMagic, wire::kMaxRequestBlocks, 1, 0, capability_for(below(2), kEpoch)});
    for (uint32_t i = 0; i < wire::kMaxRequestBlocks; ++i) {
        const Record& record = records[below(records.size())];
        append(data, wire::SlotRef{record.offset + 128 * below(2), record.generation + below(2), record.length, 0});
    }
    return data;
}

Fd dial(uint16_t port) {
    Fd fd = begin_connect(kHost, port);
    CHECK(wait_for(fd.get(), short{POLLOUT}, soon()));
    return fd;
}

// Sends what goes without waiting; true when that was all.
bool push(const Fd& fd, const std::vector<uint8_t>& data, size_t& at) {
    const ssize_t sent = send(fd.get(), data.data() + at, data.size() - at, MSG_NOSIGNAL);
    if (sent > 0) at += static_cast<size_t>(sent);
    return at == data.size();
}

}  // namespace

TEST(a_connection_makes_the_owner_hold_no_more_than_its_bound_whatever_is_sent) {
    constexpr size_t kConnections = 16;
    Arena owner(70000, 32);
    const Arena::Content content = owner.fill();
    std::vector<std::vector<uint8_t>> sent(kConnections);
    for (auto& data : sent) {
        data = hello();
        for (int n = 0; n < 4; ++n) {
            const auto request = longest_request(content.records);
            data.insert(data.end(), request.begin(), request.end());
        }
        data.resize(data.size() - below(5000));  // the last one is cut
    }
    std::vector<Fd> peers;
    std::vector<size_t> at(kConnections, 0);
    TcpServer server(owner.region, kEpoch, kHost, 0, kConnections);
    server.grant(capability_for(1, kEpoch), content.records.data(), content.records.size());
    for (size_t i = 0; i < kConnections; ++i) peers.push_back(dial(server.port()));
    const size_t before = live;
    peak = before;
    std::array<uint8_t, 65536> sink;
    const uint64_t until = soon(1500);
    while (!expired(until)) {  // half of them never read
        for (size_t i = 0; i < kConnections; ++i) {
            push(peers[i], sent[i], at[i]);
            if (i % 2 == 0 && recv(peers[i].get(), sink.data(), sink.size(), 0) < 0) CHECK(errno == EAGAIN);
        }
    }
    CHECK(server.stats().connections == kConnections && server.stats().reads > 0);
    std::printf("    %zu bytes a connection\n", (peak - before) / kConnections);
    CHECK(peak - before <= kConnections * kConnectionBytes);
    CHECK(peak - before > kConnections * 64);  // the counter counts
}

TEST(a_read_holds_no_more_than_its_bound_whatever_the_owner_answers) {
    constexpr size_t kBlocks = 1000;
    Arena owner(64, kBlocks), reader(64, kBlocks);
    const Arena::Content content = owner.fill();
    reader.reserve();
    const auto to = reader.destinations(content.records);
    uint16_t port = 0;
    const Fd listener = listen_on(kHost, 0, &port);
    const pid_t liar = fork();
    CHECK(liar >= 0);
    if (liar == 0) {  // another process, so that what it allocates does not count
        alarm(100);
        while (true) {
            wait_for(listener.get(), short{POLLIN}, soon());
            const Fd fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
            std::vector<uint8_t> answer = hello();
            append(answer, wire::Group{wire::kGroupMagic, 1, 0, wire::kGroupBlocks});
            answer.resize(answer.size() + (below(2) != 0 ? wire::kGroupBlocks : below(300)));
            while (answer.size() < 200000) answer.push_back(static_cast<uint8_t>(random_bits()()));
            send(fd.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
        }
    }
    std::vector<uint8_t> statuses(kBlocks);
    for (int round = 0; round < 100; ++round) {
        TcpClient client(kHost, port, soon());
        const size_t before = live;
        peak = before;
        client.read({capability_for(1, kEpoch), kEpoch, content.records.data(), content.blocks(), to.data(), true, soon()}, statuses.data());
        CHECK(peak - before <= kReadingBytes + kBlocks * kReadingBytesPerBlock);
        for (const uint8_t status : statuses) CHECK(status != OK);
    }
    kill(liar, SIGKILL);
    CHECK(waitpid(liar, nullptr, 0) == liar);
}
