#include "table.hpp"

#include <algorithm>
#include <cstring>
#include <new>

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
    region_.commit(Segment::slots, std::min((expected + expected / 4 + kTail + 8) * sizeof(Slot), room_bytes()));
    state_ = {};
    state_.total = region_.extent(Segment::slots).committed_bytes / sizeof(Slot);
    state_.capacity = state_.total - kTail;
    moving_.resize(2 * kMoveSlots);
}

void Table::reserve(u64 count) {
    for (u64 credit = count * kMovesPerInsert; growing() && credit;) {
        credit -= std::min(credit, move_chunk());
        region_.turn_section();
    }
    while (!fits(count)) {
        if (!grow(count)) throw std::bad_alloc();
    }
}

// Whole granules by which the slots may still grow.
u64 Table::room_bytes() const {
    const Extent& extent = region_.extent(Segment::slots);
    u64 bytes = extent.committed_bytes;
    u64 room = std::min({region_.spare_bytes(), limit_bytes_ - std::min(limit_bytes_, bytes), extent.reserved_bytes - bytes});
    u64 granule = region_.granule_bytes(bytes + room);
    u64 end = (bytes + room) / granule * granule;
    return end - std::min(end, bytes);
}

u64 Table::most() const {
    u64 tail = state_.total - state_.capacity;
    return limit((region_.extent(Segment::slots).committed_bytes + room_bytes()) / sizeof(Slot) - tail);
}

// By up to 1.2 in whole granules, so the load stays in [0.66, 0.8] and a block costs 20 to 24 bytes; by 1.5 while the table is
// so small that this does not matter. The last step takes all that is left rather than leave a rest behind for which sweeping
// the whole table would be too much: less than a tenth is no step.
u64 Table::growth_bytes(u64 count) const {
    u64 bytes = state_.total * sizeof(Slot);
    u64 granule = region_.granule_bytes(bytes);
    u64 step = std::max(bytes / (bytes < Region::kHugeFrom ? 2 : 5) / granule * granule, granule);
    u64 blocks = state_.used + count;
    u64 needed = (blocks + blocks / 4 + (state_.total - state_.capacity) + 8) * sizeof(Slot);
    step = std::max(step, needed - std::min(needed, bytes));
    u64 room = room_bytes();
    if (room < bytes / 10) return 0;
    return step > room || room - step < (bytes + step) / 8 ? room : step;
}

bool Table::grow(u64 count) {
    for (; growing(); region_.turn_section()) move_chunk();
    u64 step = growth_bytes(count);
    if (step == 0) return false;
    region_.commit(Segment::slots, state_.total * sizeof(Slot) + step);
    state_.frontier = state_.total;
    state_.old_capacity = state_.capacity;
    state_.old_last_key = ~u64{0};
    u64 tail = state_.total - state_.capacity;  // never shrinks: clusters only get shorter by growth
    state_.total = region_.extent(Segment::slots).committed_bytes / sizeof(Slot);
    state_.capacity = state_.total - tail;
    return true;
}

// Moves the topmost clusters of the old layout; returns how many slots the sweep has passed. Noexcept from the first write on:
// the tail is long enough for every cluster of before, and should it not be and memory be exhausted, too, we stop rather
// than lose blocks.
u64 Table::move_chunk() {
    const u64 end = state_.frontier;
    u64 start = end > kMoveSlots ? end - kMoveSlots : 0;
    while (start > 0 && slots_[start - 1].key != 0) --start;
    const u64 count = end - start;
    if (moving_.size() < count) moving_.resize(count);
    std::memcpy(static_cast<void*>(moving_.data()), slots_ + start, count * sizeof(Slot));
    std::memset(static_cast<void*>(slots_ + start), 0, count * sizeof(Slot));

    const u64 above = first_home_above(state_.old_last_key);
    state_.frontier = start;
    state_.old_last_key = last_key_below(start, state_.old_capacity);
    if (start == 0) state_.old_capacity = 0;
    place(moving_.data(), count, first_home_above(state_.old_last_key), above);
    return count;
}

// First home in the new layout of the keys behind `key`.
u64 Table::first_home_above(u64 key) const {
    return key == ~u64{0} ? state_.total - kGuard - 1 : home_in(key + 1, state_.capacity);
}

// Puts a chunk, empty slots and all, to its new homes, which are in [from, above]. Below `above` the new layout is still empty,
// so a slot is written without asking whether it is occupied or even in use: an empty one is overwritten by the next. No
// branch depends on which slots are empty. At `above`, where rounding lets two chunks touch, the upper one makes room.
void Table::place(const Slot* chunk, u64 count, u64 from, u64 above) noexcept {
    const u64 capacity = state_.capacity;
    u64 next = from;
    for (const Slot* slot = chunk; slot != chunk + count; ++slot) {
        u64 at = std::max(home_in(slot->key, capacity), next);
        if (at < above) {
            slots_[at] = *slot;
            next = at + (slot->key != 0);
        } else if (slot->key != 0) {
            insert_at(at, *slot);
            next = at + 1;
        }
    }
}

void Table::extend() {
    region_.commit_within_section(Segment::slots, (state_.total + 1) * sizeof(Slot));
    state_.total = region_.extent(Segment::slots).committed_bytes / sizeof(Slot);
}

// Puts the slot at `at`; what stands there and behind moves up by one, to the end of the cluster.
void Table::insert_at(u64 at, Slot slot) {
    if (slots_[state_.total - kGuard - 1].key != 0) extend();
    typedef u64 Pair __attribute__((vector_size(16), may_alias));
    Pair carried = {slot.key, u64{slot.access} << 32 | slot.set};
    for (auto* place = reinterpret_cast<Pair*>(slots_ + at);; ++place) {
        u64 key = reinterpret_cast<Slot*>(place)->key;
        Pair here = *place;
        *place = carried;
        if (key == 0) return;
        carried = here;
    }
}

Slot* Table::put(u64 key) {
    u64 at = seek(key);
    if (slots_[at].key == key) return slots_ + at;
    if (key <= state_.old_last_key && slots_[state_.frontier - 1].key != 0) {
        u64 end = at;
        while (end < state_.frontier && slots_[end].key != 0) ++end;
        if (end == state_.frontier) {  // the cluster would cross the frontier: move it, then look again
            move_chunk();
            return put(key);
        }
    }
    insert_at(at, {key, 0, 0});
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
        if (growing() && at == state_.frontier) at = std::max(at, first_home_above(state_.old_last_key));
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
    for (u64 i = 1; i <= kGuard; ++i) {
        if (slots_[state_.total - i].key != 0) return "the last slots are not empty";
    }
    return nullptr;
}

}  // namespace kvdir
