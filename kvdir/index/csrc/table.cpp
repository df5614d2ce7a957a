#include "table.hpp"

#include <algorithm>
#include <cstring>

namespace kvdir {

namespace {

constexpr u64 kTail = 64;  // slots behind the capacity for the last cluster; more are committed when it runs further

u64 home_in(u64 key, u64 capacity) { return static_cast<u64>((u128{key} * capacity) >> 64); }

// Largest key whose home in `capacity` is below `slot`; 0 when there is none.
u64 last_key_below(u64 slot, u64 capacity) {
    if (slot == 0) return 0;
    if (slot >= capacity) return ~u64{0};
    return static_cast<u64>(((u128{slot} << 64) - 1) / capacity);
}

}  // namespace

void Table::create(u64 expected) {
    region_.commit(Segment::slots, (expected + expected / 4 + kTail + 8) * sizeof(Slot));
    state_ = {};
    state_.total = region_.extent(Segment::slots).committed_bytes / sizeof(Slot);
    state_.capacity = state_.total - kTail;
    moving_.reserve(2 * kMoveSlots);
}

void Table::reserve(u64 count) {
    for (u64 credit = count * kMovesPerInsert; growing() && credit;) credit -= std::min(credit, move_chunk());
    while (state_.used + count > limit(state_.capacity)) {
        while (growing()) move_chunk();
        begin_growth(count);
    }
}

// By about 1.15, in whole granules: the load after growth is 0.69 or more, except while a granule is a larger step.
void Table::begin_growth(u64 count) {
    u64 bytes = state_.total * sizeof(Slot);
    u64 granule = region_.granule_bytes(bytes);
    u64 step = std::max(bytes * 15 / 100 / granule * granule, granule);
    u64 blocks = state_.used + count;
    u64 needed = (blocks + blocks / 4 + (state_.total - state_.capacity) + 8) * sizeof(Slot);
    region_.commit(Segment::slots, std::max(bytes + step, needed));
    state_.frontier = state_.total;
    state_.old_capacity = state_.capacity;
    state_.old_last_key = ~u64{0};
    u64 tail = state_.total - state_.capacity;  // never shrinks: clusters only get shorter by growth
    state_.total = region_.extent(Segment::slots).committed_bytes / sizeof(Slot);
    state_.capacity = state_.total - tail;
}

// Moves the topmost clusters of the old layout; returns how many slots the sweep has passed.
u64 Table::move_chunk() {
    u64 end = state_.frontier;
    u64 start = end > kMoveSlots ? end - kMoveSlots : 0;
    while (start > 0 && slots_[start - 1].key != 0) --start;
    moving_.clear();
    for (u64 at = start; at < end; ++at) {
        if (slots_[at].key != 0) moving_.push_back(slots_[at]);
    }
    std::memset(static_cast<void*>(slots_ + start), 0, (end - start) * sizeof(Slot));
    state_.frontier = start;
    state_.old_last_key = last_key_below(start, state_.old_capacity);
    if (start == 0) state_.old_capacity = 0;
    place(moving_);
    return end - start;
}

// Rounding can make two neighbouring chunks touch by a slot; then the upper one, whose keys are larger, makes room. The tail
// is long enough for that; should it not be and memory be exhausted, too, we stop rather than lose blocks: noexcept.
void Table::place(const std::vector<Slot>& run) noexcept {
    u64 next = 0;
    for (const Slot& slot : run) {
        u64 at = std::max(home_in(slot.key, state_.capacity), next);
        if (slots_[at].key != 0) open_gap(at);
        slots_[at] = slot;
        next = at + 1;
    }
}

// Shifts the slots from `at` to the end of the cluster up by one.
void Table::open_gap(u64 at) {
    u64 end = at;
    while (slots_[end].key != 0) ++end;
    if (end + 1 >= state_.total) {
        region_.commit(Segment::slots, (state_.total + 1) * sizeof(Slot));
        state_.total = region_.extent(Segment::slots).committed_bytes / sizeof(Slot);
    }
    std::memmove(static_cast<void*>(slots_ + at + 1), slots_ + at, (end - at) * sizeof(Slot));
}

Slot* Table::put(u64 key) {
    u64 at = seek(key);
    if (slots_[at].key == key) return slots_ + at;
    if (key <= state_.old_last_key) {
        u64 end = at;
        while (end < state_.frontier && slots_[end].key != 0) ++end;
        if (end >= state_.frontier) {  // the cluster would cross the frontier: move it, then look again
            move_chunk();
            return put(key);
        }
    }
    open_gap(at);
    slots_[at] = {key, 0, 0};
    ++state_.used;
    return slots_ + at;
}

void Table::erase(u64 at) {
    while (slots_[at + 1].key != 0 && home(slots_[at + 1].key) <= at) {
        slots_[at] = slots_[at + 1];
        ++at;
    }
    slots_[at] = {};
    --state_.used;
}

u64 Table::skip_empty(u64 at) const {
    for (; at < state_.total; ++at) {
        if (growing() && at == state_.frontier) at = std::max(at, home_in(state_.old_last_key + 1, state_.capacity));
        if (slots_[at].key != 0) return at;
    }
    return state_.total;
}

const char* Table::fault() const {
    u64 used = 0, previous = 0;
    for (u64 at = 0; at < state_.total; ++at) {
        u64 key = slots_[at].key;
        if (key == 0) continue;
        ++used;
        if (key <= previous) return "keys do not ascend";
        previous = key;
        if (key <= state_.old_last_key && at >= state_.frontier) return "an old cluster crosses the frontier";
        if (home(key) > at) return "a key stands below its home";
        for (u64 between = home(key); between < at; ++between) {
            if (slots_[between].key == 0) return "a gap between a key and its home";
        }
    }
    if (used != state_.used) return "the count of used slots is wrong";
    if (slots_[state_.total - 1].key != 0) return "the last slot is not empty";
    return nullptr;
}

}  // namespace kvdir
