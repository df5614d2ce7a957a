// The buddy allocator: blocks never overlap, and everything merges again.
#include <cstring>
#include <map>

#include "check.hpp"
#include "pool.hpp"

using namespace kvdir;

namespace {

struct Fixture {
    PoolState state{};
    Region region{{4096, 4096, 4096, 4096, u64{1} << 30, u64{1} << 24, 4096}};
    Pool pool{region, state};
    std::map<u32, u32> blocks;  // first chunk -> order

    Fixture() { pool.create(); }

    void allocate(u32 order) {
        u32 chunk = pool.allocate(order);
        CHECK(chunk != 0 && chunk % (1u << order) == 0);
        auto next = blocks.lower_bound(chunk);
        CHECK(next == blocks.end() || chunk + (1u << order) <= next->first);
        if (next != blocks.begin()) {
            --next;
            CHECK(next->first + (1u << next->second) <= chunk);
        }
        blocks[chunk] = order;
        std::memset(pool.words(chunk), 0xFF, u64{16} << order);
    }
    void release(std::map<u32, u32>::iterator at) {
        pool.release(at->first, at->second);
        blocks.erase(at);
    }
};

TEST(the_order_fits_the_words) {
    CHECK(Pool::order_of(1) == 0 && Pool::order_of(4) == 0 && Pool::order_of(5) == 1 && Pool::order_of(8) == 1);
    CHECK(Pool::order_of(9) == 2 && Pool::order_of(256) == 6 && Pool::order_of(257) == 7 && Pool::order_of(1u << 24) == 22);
}

TEST(blocks_never_overlap_under_churn) {
    Fixture fixture;
    for (int step = 0; step < 40000; ++step) {
        if (below(2) || fixture.blocks.empty()) {
            fixture.allocate(static_cast<u32>(below(8)));
        } else {
            auto at = fixture.blocks.lower_bound(static_cast<u32>(below(fixture.state.end)));
            fixture.release(at == fixture.blocks.end() ? fixture.blocks.begin() : at);
        }
    }
    u32 live = 0;
    for (auto [chunk, order] : fixture.blocks) live += 1u << order;
    CHECK(live == fixture.pool.live_chunks());
}

// Phases of one size after another: without merging each would need its own memory.
TEST(changing_sizes_reuse_the_same_memory) {
    Fixture fixture;
    for (int round = 0; round < 3; ++round) {
        for (u32 order = 0; order < 10; ++order) {
            for (u32 i = 0; i < 65536u >> order; ++i) fixture.allocate(order);
            while (!fixture.blocks.empty()) {
                auto at = fixture.blocks.lower_bound(static_cast<u32>(below(fixture.state.end)));
                fixture.release(at == fixture.blocks.end() ? fixture.blocks.begin() : at);
            }
            CHECK(fixture.pool.live_chunks() == 0);
        }
    }
    CHECK(fixture.state.end <= 65536 + 2 * 1024);
}

TEST(exhaustion_throws_and_keeps_what_is_there) {
    PoolState state{};
    Region region{{4096, 4096, 4096, 4096, Region::kHugePage, 1 << 20, 4096}};
    Pool pool{region, state};
    pool.create();
    std::vector<u32> chunks;
    try {
        for (;;) chunks.push_back(pool.allocate(3));
    } catch (const std::bad_alloc&) {
    }
    CHECK(chunks.size() > 10000 && pool.live_chunks() == chunks.size() * 8);
    for (u32 chunk : chunks) pool.release(chunk, 3);
    CHECK(pool.live_chunks() == 0);
    pool.allocate(10);
}

}  // namespace
