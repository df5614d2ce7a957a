// Hash table from 64-bit key to (set, last access), kept in the order of its keys.
//
//   slot, 16 bytes:  | key 8 | set 4 | access 4 |      key 0 = empty
//
// The home of a key is key * capacity / 2^64, which rises with the key. Collisions go to the next free slot, in key order, so
// the array is one sorted sequence with gaps:
//
//   capacity 8:   home     0     0     2           5     5     5
//                 slot  [ 03 ][ 1c ][ 41 ][    ][    ][ a0 ][ ab ][ b1 ] ...   (first byte of the key)
//
// What the order buys: a probe stops at the first larger key, so misses cost no more than hits; erasing shifts the rest of
// the cluster back and leaves no tombstone; a walk in key order needs no bookkeeping (see Index::dump); and the table can
// grow in place:
//
//   slot   0 ......... frontier ............. capacity of before ..... capacity of now
//          [ old layout ][       vacated      |  new layout, filled from the top down ]
//
// The sweep takes whole clusters from the top of the old layout. A new home is never below the old one, so nothing that
// has not been moved yet is overwritten. `old_last_key` says which layout a key uses. An insertion that would carry an
// old cluster across the frontier moves that cluster first.
//
// Invariants:
//   - occupied slots hold strictly ascending keys; a key is not below its home, and no slot between the two is empty;
//   - while growing, the old layout ends before `frontier`, where a cluster never continues;
//   - the last kGuard committed slots are empty, so every scan ends and may look a little ahead;
//   - the load stays below kMaxLoad of the capacity, counting both layouts.
// Readers in other processes follow the same layout with checks of their own: region_lookup.cpp.
#pragma once

#include <vector>

#include "region.hpp"

namespace kvdir {

struct Slot {
    u64 key;
    u32 set;
    u32 access;  // seconds, coarse
};
static_assert(sizeof(Slot) == 16);

enum class Purpose { find, put };

struct TableState {
    u64 capacity;      // range of homes in the new layout
    u64 old_capacity;  // range of homes in the old layout; 0 when not growing
    u64 old_last_key;  // keys up to this one still use the old layout; 0 = none (no key is 0)
    u64 frontier;      // first slot behind the old layout; 0 when not growing
    u64 total;         // committed slots: capacity, and room for the last cluster to run on
    u64 used;          // occupied slots
};

class Table {
public:
    static constexpr u64 kGuard = 4;
    static constexpr u64 kMoveSlots = 512;  // the sweep moves about this many slots at a time: 8 KiB, fits in L1
    static constexpr u64 kMovesPerInsert = 32;  // growth by >= 1/10 at load 0.8 needs 12.5 to end in time

    Table(Region& region, TableState& state) : region_(region), state_(state), slots_(region.at<Slot>(Segment::slots)) {}
    Table(const Table&) = delete;
    Table& operator=(const Table&) = delete;

    void create(u64 expected);  // once, before anything else

    // The slots never take more than `bytes`; a table that is larger already stays as it is.
    void set_limit(u64 bytes) { limit_bytes_ = bytes; }

    u64 home(u64 key) const {
        u64 capacity = key <= state_.old_last_key ? state_.old_capacity : state_.capacity;
        return static_cast<u64>((u128{key} * capacity) >> 64);
    }

    // A lookup ends in the home line or the next; an insertion shifts to the end of its cluster, mostly within four.
    // Inlined by force: as a function of its own, gcc takes a prefetch for one without effect and drops the call.
    template <Purpose purpose>
    [[gnu::always_inline]] void prefetch(u64 key) const {
        const Slot* slot = slots_ + home(key);
        __builtin_prefetch(slot);
        __builtin_prefetch(slot + 4);
        if (purpose == Purpose::find) return;
        __builtin_prefetch(slot + 8);
        __builtin_prefetch(slot + 12);
    }

    // First slot at or behind the key's home that is empty or holds a key not smaller.
    // Four at a time and without branches in between, because where a probe ends is a coin that no predictor can guess.
    u64 seek(u64 key) const {
        u64 at = home(key);
        for (;;) {
            const Slot* slot = slots_ + at;
            auto smaller = [&](int i) -> u64 { return slot[i].key - 1 < key - 1; };  // an empty slot wraps to the largest
            u64 passed = smaller(0) + smaller(1) + smaller(2) + smaller(3);
            at += passed;
            if (passed < 4) return at;
        }
    }

    Slot* find(u64 key) const {
        Slot* slot = slots_ + seek(key);
        return slot->key == key ? slot : nullptr;
    }

    bool fits(u64 count) const { return state_.used + count <= limit(state_.capacity); }
    u64 excess(u64 count) const { return fits(count) ? 0 : state_.used + count - limit(state_.capacity); }

    // Makes sure that `count` insertions fit, and pays for growth in proportion: never more than a fixed number of moves per
    // insertion. Call before `put`. Throws std::bad_alloc when memory is exhausted; nothing is lost then.
    void reserve(u64 count);

    // Makes the table larger, for `count` more insertions or as far as it may; false when it may not.
    bool grow(u64 count);

    // So many blocks it could hold at its limit.
    u64 most() const;

    // The slot of the key; when it is new, its `set` is 0 and `used` has risen.
    Slot* put(u64 key);

    // Empties a slot; the rest of its cluster moves back. Another block may stand at `at` afterwards.
    void erase(u64 at);

    // Slot index of the first block whose key is not smaller, or `total()`. Walks past the vacated part.
    u64 lower_bound(u64 key) const { return skip_empty(key ? seek(key) : 0); }
    u64 skip_empty(u64 at) const;

    Slot& operator[](u64 at) const { return slots_[at]; }
    u64 index_of(const Slot* slot) const { return static_cast<u64>(slot - slots_); }
    u64 total() const { return state_.total; }
    u64 used() const { return state_.used; }
    u64 capacity() const { return state_.capacity; }
    bool growing() const { return state_.old_capacity != 0; }

    // Checks every invariant above; for tests. Returns what is wrong, or nullptr.
    const char* fault() const;

private:
    static u64 limit(u64 capacity) { return capacity - capacity / 5; }
    u64 room_bytes() const;
    u64 growth_bytes(u64 count) const;
    u64 move_chunk();
    u64 first_home_above(u64 key) const;
    void place(const Slot* chunk, u64 count, u64 from, u64 above) noexcept;
    void insert_at(u64 at, Slot slot);
    void extend();

    Region& region_;
    TableState& state_;
    Slot* slots_;
    std::vector<Slot> moving_;  // scratch of move_chunk
    u64 limit_bytes_ = ~u64{0};
};

}  // namespace kvdir
