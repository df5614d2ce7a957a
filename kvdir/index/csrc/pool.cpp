#include "pool.hpp"

#include <new>

namespace kvdir {

void Pool::link(u32 chunk, u32 order) noexcept {
    block(chunk) = {state_.free[order], 0, order, 0};
    if (state_.free[order]) block(state_.free[order]).previous = chunk;
    state_.free[order] = chunk;
    map_[chunk / 64] |= u64{1} << (chunk % 64);
}

void Pool::unlink(u32 chunk) noexcept {
    const FreeBlock free = block(chunk);
    if (free.next) block(free.next).previous = free.previous;
    (free.previous ? block(free.previous).next : state_.free[free.order]) = free.next;
    map_[chunk / 64] &= ~(u64{1} << (chunk % 64));
}

// Takes new chunks from the end, aligned to the order; what alignment skips becomes free.
u32 Pool::extend(u32 order) {
    u64 size = u64{1} << order;
    u64 start = (state_.end + size - 1) / size * size;
    if (start + size > ~u32{0}) throw std::bad_alloc();
    region_.commit(Segment::words, (start + size) * sizeof(FreeBlock));
    region_.commit(Segment::word_map, (start + size) / 8 + sizeof(u64));
    u32 gap = state_.end;
    state_.end = static_cast<u32>(start + size);
    while (gap < start) {
        u32 gap_order = static_cast<u32>(__builtin_ctz(gap));
        link(gap, gap_order);  // its lower buddy is in use or smaller: there is nothing to merge with
        gap += 1u << gap_order;
    }
    return static_cast<u32>(start);
}

u32 Pool::allocate(u32 order) {
    u32 from = order;
    while (from < kPoolOrders && !state_.free[from]) ++from;
    u32 chunk;
    if (from == kPoolOrders) {
        chunk = extend(order);
    } else {
        chunk = state_.free[from];
        unlink(chunk);
        while (from > order) {
            --from;
            link(chunk + (1u << from), from);
        }
    }
    state_.live += 1u << order;
    return chunk;
}

void Pool::release(u32 chunk, u32 order) noexcept {
    state_.live -= 1u << order;
    while (order + 1 < kPoolOrders) {
        u32 buddy = chunk ^ (1u << order);
        if (buddy == 0 || buddy >= state_.end || !is_free(buddy) || block(buddy).order != order) break;
        unlink(buddy);
        chunk = chunk < buddy ? chunk : buddy;
        ++order;
    }
    link(chunk, order);
}

}  // namespace kvdir
