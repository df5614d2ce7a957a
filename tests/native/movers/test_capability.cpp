// Requests of readers that show anything, against an owner with grants that come, end and run out: a block is served if and only
// if the capability is, bit for bit, that of a live grant which covers it.
#include "arena.hpp"
#include "clock.hpp"
#include "tcp_reading.hpp"
#include "tcp_server.hpp"

using namespace kvdir;

namespace {

constexpr uint64_t kEpoch = 9, kLocks = 4, kSlots = 16;
constexpr const char* kHost = "127.0.0.1";

uint64_t soon() { return now_ns() + 20000 * 1000000ULL; }

// What the owner has given under a lock: the slots [first, last) if it is live.
struct Given {
    wire::Capability capability{};
    uint64_t first = 0, last = 0;
    bool live = false;
};

wire::Capability damaged(const wire::Capability& whole) {
    wire::Capability capability = whole;
    auto* bytes = reinterpret_cast<uint8_t*>(&capability);
    for (uint64_t flips = 1 + below(3); flips != 0; --flips) bytes[below(sizeof capability)] ^= static_cast<uint8_t>(1 << below(8));
    return std::memcmp(&capability, &whole, sizeof whole) == 0 ? damaged(whole) : capability;  // a bit may flip back
}

}  // namespace

TEST(blocks_are_served_only_for_the_capability_of_a_live_grant_that_covers_them) {
    Arena owner(500, kSlots), reader(500, kSlots);
    const Arena::Content content = owner.fill();
    reader.reserve();
    const auto to = reader.destinations(content.records);
    TcpServer server(owner.region, kEpoch, kHost, 0, 8);
    TcpClient client(kHost, server.port(), soon());
    std::vector<Given> given(kLocks);
    uint64_t served = 0;
    for (uint64_t round = 0; round < 6000; ++round) {
        const uint64_t lock = below(kLocks);
        Given& mine = given[lock];
        switch (below(6)) {
            case 0: {  // another grant of the lock, perhaps one that has run out already
                mine.live = below(4) != 0;
                mine.capability = capability_for(lock, kEpoch, mine.live ? UINT64_MAX - round : now_ns() - 1);
                mine.first = below(kSlots);
                mine.last = mine.first + 1 + below(kSlots - mine.first);
                server.grant(mine.capability, content.records.data() + mine.first, mine.last - mine.first);
                break;
            }
            case 1:
                server.revoke(lock);
                mine.live = false;
                break;
            default: break;
        }
        wire::Capability shown = mine.capability;
        const bool whole = below(2) != 0;
        if (!whole) shown = below(4) == 0 ? capability_for(lock, kEpoch, round) : damaged(shown);
        std::vector<uint8_t> statuses(kSlots, 255);
        client.read({shown, kEpoch, content.records.data(), content.blocks(), to.data(), true, soon()}, statuses.data());
        for (uint64_t slot = 0; slot < kSlots; ++slot) {
            const bool covered = whole && mine.live && slot >= mine.first && slot < mine.last;
            const bool stale = statuses[slot] == STALE && shown.epoch != kEpoch;
            CHECK(covered ? statuses[slot] == OK : statuses[slot] == ABSENT || stale);
            if (covered) CHECK(owner.same_payload(slot, reader));
            served += covered;
        }
    }
    CHECK(served > 0 && !client.broken());
    const ServerStats& stats = server.stats();
    for (const Refusal why : {Refusal::MALFORMED, Refusal::EPOCH, Refusal::EXPIRED, Refusal::ENDED, Refusal::FORGED})
        CHECK(stats.requests[static_cast<size_t>(why)] > 0);
    CHECK(stats.uncovered > 0 && stats.protocol_errors == 0);
}
