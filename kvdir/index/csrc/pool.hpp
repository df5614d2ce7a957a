// Allocator for holder arrays: a buddy system over chunks of 16 bytes, named by chunk number (1, 2, ...; 0 = none).
//
//   order 0: 4 words (1 chunk)   order 1: 8 words (2 chunks)   ...   a block of order k starts at a multiple of 2^k
//
//   free block:  | next 4 | previous 4 | order 4 | - |       doubly linked per order, by chunk number
//   word_map:    one bit per chunk, set where a free block starts
//
// Freeing merges with the buddy as long as that is free and whole, so no pattern of set sizes, however hostile, keeps more
// than the peak of what was live (rounded up to powers of two).
// Invariant: no two free buddies of one order exist; the bit of a chunk is set exactly where a free block starts.
#pragma once

#include "region.hpp"

namespace kvdir {

constexpr u32 kPoolOrders = 24;  // up to 2^24 holders in a set: order 22

struct PoolState {
    u32 end;                 // chunks below have been handed out at least once
    u32 live;                // chunks in use
    u32 free[kPoolOrders];   // first free block of each order, 0 = none
};

class Pool {
public:
    Pool(Region& region, PoolState& state)
        : region_(region), state_(state), words_(region.at<u32>(Segment::words)), map_(region.at<u64>(Segment::word_map)) {}
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    void create() { state_ = {}, state_.end = 1; }  // once; chunk 0 names nothing

    static u32 order_of(u32 words) {
        u32 chunks = (words + 3) / 4;
        return chunks <= 1 ? 0 : 32 - static_cast<u32>(__builtin_clz(chunks - 1));
    }

    u32 allocate(u32 order);  // throws std::bad_alloc, and then nothing has changed
    void release(u32 chunk, u32 order) noexcept;

    u32* words(u32 chunk) const { return words_ + u64{chunk} * 4; }
    bool holds(u32 chunk, u32 count) const { return u64{chunk} * 4 + count <= u64{state_.end} * 4; }
    u32 live_chunks() const { return state_.live; }

private:
    struct FreeBlock {
        u32 next, previous, order, unused;
    };
    static_assert(sizeof(FreeBlock) == 16);

    FreeBlock& block(u32 chunk) const { return reinterpret_cast<FreeBlock*>(words_)[chunk]; }
    bool is_free(u32 chunk) const { return map_[chunk / 64] >> (chunk % 64) & 1; }
    void link(u32 chunk, u32 order) noexcept;
    void unlink(u32 chunk) noexcept;
    u32 extend(u32 order);

    Region& region_;
    PoolState& state_;
    u32* words_;
    u64* map_;
};

}  // namespace kvdir
