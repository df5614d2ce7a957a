// Server and client of the tcp plane in one process: random lists, random grants, garbage from both sides, closes at any time.
#include <sys/socket.h>

#include <atomic>
#include <thread>

#include "arena.hpp"
#include "clock.hpp"
#include "tcp_reading.hpp"
#include "tcp_server.hpp"

using namespace kvdir;

namespace {

constexpr uint64_t kEpoch = 9;
constexpr const char* kHost = "127.0.0.1";

uint64_t soon(uint64_t ms = 20000) { return now_ns() + ms * 1000000ULL; }

struct Bed {
    Arena owner, reader;
    Arena::Content content;
    TcpServer server;

    Bed(uint64_t block_bytes, uint64_t slots)
        : owner(block_bytes, slots), reader(block_bytes, slots), content(owner.fill()), server(owner.region, kEpoch, kHost, 0, 32) {
        reader.reserve();
        server.grant(capability_for(1, kEpoch), content.records.data(), content.records.size());
    }

    std::vector<uint8_t> read(TcpClient& client, const std::vector<Record>& records, bool check = true, uint64_t lock = 1) {
        const auto to = reader.destinations(records);
        std::vector<uint8_t> statuses(records.size(), 255);
        client.read({capability_for(lock, kEpoch), kEpoch, records.data(), content.blocks(), to.data(), check, soon()}, statuses.data());
        for (size_t i = 0; i < records.size(); ++i) {
            CHECK(statuses[i] <= PEER_LOST);
            if (statuses[i] == OK) CHECK(owner.same_payload(i, reader));
        }
        return statuses;
    }
};

// Raw access for peers that do not behave.
Fd dial(uint16_t port) {
    Fd fd = begin_connect(kHost, port);
    CHECK(wait_for(fd.get(), POLLOUT, soon()) && connect_error(fd.get()) == 0);
    return fd;
}

void send_raw(const Fd& fd, const std::vector<uint8_t>& data) {
    for (size_t at = 0; at < data.size();) {
        const ssize_t sent = send(fd.get(), data.data() + at, data.size() - at, MSG_NOSIGNAL);
        if (sent > 0)
            at += static_cast<size_t>(sent);
        else if (sent < 0 && errno == EAGAIN)
            CHECK(wait_for(fd.get(), POLLOUT, soon()));
        else
            return;  // the other side closed
    }
}

// What arrives until `bytes` are there or the other side closes.
std::vector<uint8_t> receive_raw(const Fd& fd, size_t bytes) {
    std::vector<uint8_t> data;
    uint8_t buffer[4096];
    while (data.size() < bytes) {
        const ssize_t got = recv(fd.get(), buffer, std::min(sizeof buffer, bytes - data.size()), 0);
        if (got > 0)
            data.insert(data.end(), buffer, buffer + got);
        else if (got < 0 && errno == EAGAIN)
            CHECK(wait_for(fd.get(), POLLIN, soon()));
        else
            break;
    }
    return data;
}

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

std::vector<uint8_t> request(const std::vector<Record>& records) {
    std::vector<uint8_t> data;
    append(data, wire::Request{wire::kRequestMagic, static_cast<uint32_t>(records.size()), 1, 0, capability_for(1, kEpoch)});
    for (const Record& record : records) append(data, wire::SlotRef{record.offset, record.generation, record.length, 0});
    return data;
}

void damage(std::vector<uint8_t>& data) {
    for (uint64_t flips = below(4); flips != 0 && !data.empty(); --flips) data[below(data.size())] ^= static_cast<uint8_t>(1 + below(255));
    if (below(3) == 0) data.resize(below(data.size() + 1));
    if (below(3) == 0)
        for (uint64_t more = below(200); more != 0; --more) data.push_back(static_cast<uint8_t>(random_bits()()));
}

}  // namespace

TEST(blocks_arrive_for_many_sizes_and_counts) {
    const uint64_t shapes[][2] = {{1, 1}, {100, 200}, {4096, 64}, {4096, 65}, {70000, 40}, {300000, 9}, {1 << 20, 3}, {3 << 20, 2}};
    for (const auto& [size, slots] : shapes) {
        Bed bed(size, slots);
        TcpClient client(kHost, bed.server.port(), soon());
        for (const bool check : {true, false}) CHECK(bed.read(client, bed.content.records, check) == std::vector<uint8_t>(slots, OK));
    }
}

TEST(more_blocks_than_one_request_holds_are_pipelined) {
    Bed bed(64, 2 * wire::kMaxRequestBlocks + 17);
    TcpClient client(kHost, bed.server.port(), soon());
    CHECK(bed.read(client, bed.content.records) == std::vector<uint8_t>(bed.content.records.size(), OK));
    CHECK(bed.server.stats().reads == 3);
}

TEST(random_lists_get_a_status_each) {
    Bed bed(5000, 16);
    TcpClient client(kHost, bed.server.port(), soon());
    for (int round = 0; round < 3000; ++round) {
        std::vector<Record> records = bed.content.records;
        for (Record& record : records) {
            switch (below(8)) {
                case 0: record.offset = random_bits()(); break;
                case 1: record.offset += 128; break;
                case 2: record.generation += below(4); break;
                case 3: record.length = static_cast<uint32_t>(below(6000)); break;
                case 4: record.state = 0; break;
                case 5: record.checksum ^= 1; break;
                default: break;
            }
        }
        const auto statuses = bed.read(client, records, below(2) != 0);
        CHECK(!client.broken());
        for (size_t i = 0; i < records.size(); ++i)
            if (std::memcmp(&records[i], &bed.content.records[i], sizeof(Record)) == 0) CHECK(statuses[i] == OK);
    }
}

TEST(server_survives_garbage) {
    Bed bed(2000, 8);
    for (int round = 0; round < 1500; ++round) {
        std::vector<uint8_t> data = below(8) != 0 ? hello() : std::vector<uint8_t>{};
        const auto asked = request(bed.content.records);
        for (uint64_t n = below(3); n != 0; --n) data.insert(data.end(), asked.begin(), asked.end());
        damage(data);
        const Fd fd = dial(bed.server.port());
        send_raw(fd, data);
        if (below(2) != 0) continue;  // leaves without reading
        shutdown(fd.get(), SHUT_WR);
        receive_raw(fd, 1 << 20);
    }
    TcpClient client(kHost, bed.server.port(), soon());
    CHECK(bed.read(client, bed.content.records) == std::vector<uint8_t>(8, OK));
}

TEST(reader_survives_garbage) {
    Bed bed(2000, 8);
    const Fd honest = dial(bed.server.port());
    send_raw(honest, hello());
    send_raw(honest, request(bed.content.records));
    const size_t answer_bytes = sizeof(wire::Group) + 16 + 8 * (kHeaderBytes + 2000 + sizeof(wire::Trailer));
    CHECK(receive_raw(honest, sizeof(wire::Hello)).size() == sizeof(wire::Hello));
    const auto answer = receive_raw(honest, answer_bytes);
    CHECK(answer.size() == answer_bytes);

    uint16_t port = 0;
    const Fd listener = listen_on(kHost, 0, &port);
    for (int round = 0; round < 1500; ++round) {
        std::vector<uint8_t> lie = answer;
        damage(lie);
        std::thread liar([&] {
            CHECK(wait_for(listener.get(), POLLIN, soon()));
            const Fd fd(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK));
            receive_raw(fd, sizeof(wire::Hello));
            send_raw(fd, hello());
            receive_raw(fd, request(bed.content.records).size());
            send_raw(fd, lie);
        });
        TcpClient client(kHost, port, soon());
        bed.read(client, bed.content.records);
        liar.join();
    }
}

TEST(grants_come_and_go_while_blocks_are_read) {
    Bed bed(40000, 64);
    std::atomic<bool> done{false};
    std::thread owner([&] {
        while (!done.load()) {
            bed.server.revoke(2);
            bed.server.grant(capability_for(2, kEpoch), bed.content.records.data(), bed.content.records.size());
            const uint64_t next = bed.server.stats().reads + below(3);  // grants last for 0 to 2 answers
            while (!done.load() && bed.server.stats().reads < next) std::this_thread::yield();
        }
    });
    std::vector<std::thread> readers;
    std::atomic<uint64_t> good{0};
    for (int r = 0; r < 3; ++r)
        readers.emplace_back([&] {
            Arena mine(40000, 64);
            mine.reserve();
            const auto to = mine.destinations(bed.content.records);
            TcpClient client(kHost, bed.server.port(), soon());
            for (int round = 0; round < 60; ++round) {
                std::vector<uint8_t> statuses(64);
                client.read({capability_for(2, kEpoch), kEpoch, bed.content.records.data(), bed.content.blocks(), to.data(), true, soon()},
                            statuses.data());
                for (uint64_t i = 0; i < 64; ++i) {
                    CHECK(statuses[i] == OK || statuses[i] == ABSENT);
                    if (statuses[i] == OK) CHECK(bed.owner.same_payload(i, mine));
                    good += statuses[i] == OK;
                }
            }
        });
    for (std::thread& reader : readers) reader.join();
    done = true;
    owner.join();
    CHECK(good > 0);
}

TEST(closes_at_any_time_lose_blocks_but_nothing_else) {
    for (int round = 0; round < 200; ++round) {
        Bed bed(100000, 16);
        auto client = std::make_unique<TcpClient>(kHost, bed.server.port(), soon());
        std::thread closer([&] {
            for (uint64_t spin = below(20000); spin != 0; --spin) std::atomic_thread_fence(std::memory_order_seq_cst);
            if (round % 2 == 0)
                client->close();
            else
                bed.server.close();
        });
        for (const uint8_t status : bed.read(*client, bed.content.records)) CHECK(status == OK || status == PEER_LOST);
        closer.join();
    }
}

TEST(epochs_deadlines_and_broken_connections_are_statuses) {
    Bed bed(1000, 4);
    TcpClient client(kHost, bed.server.port(), soon());
    CHECK(client.epoch() == kEpoch);
    const auto to = bed.reader.destinations(bed.content.records);
    std::vector<uint8_t> statuses(4);
    client.read({capability_for(1, kEpoch), kEpoch + 1, bed.content.records.data(), bed.content.blocks(), to.data(), true, soon()}, statuses.data());
    CHECK(statuses == std::vector<uint8_t>(4, STALE));
    client.read({capability_for(1, kEpoch), kEpoch, bed.content.records.data(), bed.content.blocks(), to.data(), true, 1}, statuses.data());
    CHECK(statuses == std::vector<uint8_t>(4, LATE) && !client.broken());
    CHECK(bed.read(client, bed.content.records) == std::vector<uint8_t>(4, OK));
    client.close();
    CHECK(bed.read(client, bed.content.records) == std::vector<uint8_t>(4, PEER_LOST));
}

namespace {

constexpr uint64_t kMs = 1000000;

// Waits until the server has this many connections.
void expect_connections(const TcpServer& server, uint64_t count) {
    const uint64_t until = soon();
    while (server.stats().connections != count) {
        CHECK(!expired(until));
        std::this_thread::yield();
    }
}

}  // namespace

TEST(connections_that_keep_still_are_closed) {
    Arena owner(1 << 20, 16);
    const Arena::Content content = owner.fill();
    TcpServer server(owner.region, kEpoch, kHost, 0, 8, {100 * kMs, 100 * kMs, 100 * kMs, 100 * kMs, 10});
    server.grant(capability_for(1, kEpoch), content.records.data(), content.records.size());
    const Fd silent = dial(server.port());
    expect_connections(server, 1);
    expect_connections(server, 0);

    const Fd dripping = dial(server.port());
    expect_connections(server, 1);
    size_t sent = 0;
    do {
        CHECK(sent < sizeof(wire::Hello));
        send_raw(dripping, {hello()[sent++]});
    } while (!wait_for(dripping.get(), POLLIN, soon(20)));  // closed
    expect_connections(server, 0);

    auto half = request(content.records);
    half.resize(half.size() / 2);
    const Fd hesitant = dial(server.port());
    send_raw(hesitant, hello());
    send_raw(hesitant, half);
    expect_connections(server, 1);
    expect_connections(server, 0);

    const Fd greedy = dial(server.port());
    const int small = 4096;
    setsockopt(greedy.get(), SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    send_raw(greedy, hello());
    for (int i = 0; i < 4; ++i) send_raw(greedy, request(content.records));  // 64 MiB, more than any socket buffer holds
    expect_connections(server, 1);
    expect_connections(server, 0);
    CHECK(server.stats().protocol_errors == 0);
}

TEST(the_longest_idle_connection_gives_way_when_there_are_too_many) {
    Bed bed(1000, 4);
    TcpServer server(bed.owner.region, kEpoch, kHost, 0, 2, {soon(), soon(), soon(), 1 * kMs, 10});
    server.grant(capability_for(1, kEpoch), bed.content.records.data(), bed.content.records.size());
    TcpClient first(kHost, server.port(), soon()), second(kHost, server.port(), soon());
    CHECK(bed.read(first, bed.content.records) == std::vector<uint8_t>(4, OK));
    const uint64_t until = now_ns() + 2 * kMs;
    while (!expired(until)) std::this_thread::yield();
    CHECK(bed.read(first, bed.content.records) == std::vector<uint8_t>(4, OK));  // so `second` is the idle one
    TcpClient third(kHost, server.port(), soon());
    CHECK(bed.read(third, bed.content.records) == std::vector<uint8_t>(4, OK));
    CHECK(bed.read(second, bed.content.records) == std::vector<uint8_t>(4, PEER_LOST));
    CHECK(bed.read(first, bed.content.records) == std::vector<uint8_t>(4, OK));
    CHECK(server.stats().connections_refused == 0 && server.stats().connections == 2);
}

TEST(who_said_no_hello_gives_way_before_who_reads) {
    Bed bed(1000, 4);
    TcpServer server(bed.owner.region, kEpoch, kHost, 0, 3, {60000 * kMs, 60000 * kMs, 60000 * kMs, 1 * kMs, 10, 1 * kMs});
    server.grant(capability_for(1, kEpoch), bed.content.records.data(), bed.content.records.size());
    TcpClient first(kHost, server.port(), soon());
    const Fd silent = dial(server.port()), other = dial(server.port());
    expect_connections(server, 3);
    const uint64_t until = now_ns() + 2 * kMs;
    while (!expired(until)) std::this_thread::yield();
    TcpClient second(kHost, server.port(), soon());
    CHECK(bed.read(second, bed.content.records) == std::vector<uint8_t>(4, OK));
    CHECK(bed.read(first, bed.content.records) == std::vector<uint8_t>(4, OK));
    CHECK(receive_raw(silent, 1).empty());  // closed
    CHECK(server.stats().connections_refused == 0 && server.stats().connections == 3);
}

TEST(reads_of_one_connection_take_turns) {
    Bed bed(50000, 32);
    TcpClient client(kHost, bed.server.port(), soon());
    std::vector<std::thread> readers;
    for (int r = 0; r < 4; ++r)
        readers.emplace_back([&] {
            Arena mine(50000, 32);
            mine.reserve();
            const auto to = mine.destinations(bed.content.records);
            for (int round = 0; round < 20; ++round) {
                std::vector<uint8_t> statuses(32, 255);
                client.read({capability_for(1, kEpoch), kEpoch, bed.content.records.data(), bed.content.blocks(), to.data(), true, soon()},
                            statuses.data());
                for (uint64_t i = 0; i < 32; ++i) CHECK(statuses[i] == OK && bed.owner.same_payload(i, mine));
            }
        });
    for (std::thread& reader : readers) reader.join();
}

TEST(reads_that_were_begun_go_on_in_another_thread_or_break_the_connection) {
    Bed bed(50000, 32);
    TcpClient client(kHost, bed.server.port(), soon());
    const auto to = bed.reader.destinations(bed.content.records);
    std::vector<uint8_t> statuses(32, 255), late(32, 255);
    const ReadJob job{capability_for(1, kEpoch), kEpoch, bed.content.records.data(), bed.content.blocks(), to.data(), true, soon()};
    auto reading = client.try_read(job, statuses.data());
    CHECK(reading != nullptr && reading->begin() == Need::READ);
    CHECK(client.try_read(job, late.data()) == nullptr);  // busy
    ReadJob impatient = job;
    impatient.deadline_ns = soon(1);
    client.read(impatient, late.data());
    CHECK(late == std::vector<uint8_t>(32, LATE) && !client.broken());
    std::thread([&] {
        for (Need need = reading->advance(); need != Need::NOTHING; need = reading->advance())
            CHECK(wait_for(client.fd(), need, soon()));
        reading.reset();
    }).join();
    CHECK(statuses == std::vector<uint8_t>(32, OK));

    reading = client.try_read(job, statuses.data());
    CHECK(reading->begin() == Need::READ);
    reading.reset();  // its answer is on the way and nobody takes it
    CHECK(client.broken());
    client.read(job, statuses.data());
    CHECK(statuses == std::vector<uint8_t>(32, PEER_LOST));
}
