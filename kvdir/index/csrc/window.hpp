// What region_lookup.cpp is made of: a small map, and one window's reads of a region.
#pragma once

#include <algorithm>

#include "view.hpp"

namespace kvdir {

constexpr u32 kNone = ~u32{0};

// A small map from number to number that never shrinks.
class Numbers {
public:
    // The place of the value, and whether it is new (then kNone stands there).
    u32& operator[](u64 key) {
        if (used_ * 2 >= cells_.size()) grow();
        Cell& cell = find(key);
        used_ += !cell.used;
        if (!cell.used) cell = {key, kNone, true};
        return cell.value;
    }
    void clear() {
        if (used_) std::fill(cells_.begin(), cells_.end(), Cell{});
        used_ = 0;
    }

private:
    struct Cell {
        u64 key = 0;
        u32 value = kNone;
        bool used = false;
    };
    Cell& find(u64 key) {
        u64 at = scramble(key + kGolden) & (cells_.size() - 1);
        while (cells_[at].used && cells_[at].key != key) at = (at + 1) & (cells_.size() - 1);
        return cells_[at];
    }
    void grow() {
        std::vector<Cell> old(cells_.empty() ? 32 : cells_.size() * 2);
        old.swap(cells_);
        for (const Cell& cell : old) {
            if (cell.used) find(cell.key) = cell;
        }
    }
    std::vector<Cell> cells_;
    u64 used_ = 0;
};

// Reads of one window. `sound` turns false when what was read cannot be true; the window then counts as torn.
class Window {
public:
    // `members`: how many holders may still be read.
    Window(const RegionView& view, const Shape& shape, u64& members)
        : members_(members),
          shape_(shape),
          slots_(view.at<Slot>(Segment::slots)),
          records_(view.at<SetRecord>(Segment::records)),
          words_(view.at<u32>(Segment::words)),
          places_(view.at<u64>(Segment::places)),
          nodes_(view.at<NodeEntry>(Segment::nodes)) {}

    bool sound() const { return sound_; }

    u64 home(u64 key) const {
        u64 capacity = key <= shape_.old_last_key ? shape_.old_capacity : shape_.capacity;
        return static_cast<u64>((u128{key} * capacity) >> 64);
    }
    [[gnu::always_inline]] void prefetch(u64 key) const {
        const Slot* slot = slots_ + home(key);
        __builtin_prefetch(slot);
        __builtin_prefetch(slot + 4);
    }

    // The set that the block's slot names, aliases followed; 0 when nobody has it.
    u32 set_of(u64 key) {
        u32 named = find(key);
        if (named != named_) {
            named_ = named;
            canonical_ = resolve(named);
        }
        return canonical_;
    }

    // Calls every(number) for each holder of a canonical set, and visible(node id, tier) for those that answers may name.
    template <class Every, class Visible>
    void holders(u32 canonical, Every every, Visible visible) {
        const SetRecord* record = records_ + canonical;
        u64 start = u64{peek(&record->chunk)} * 4, count = peek(&record->count);
        if (start > shape_.words || count > shape_.words - start || count > members_) {
            sound_ = false;
            members_ -= std::min(members_, count);
            return;
        }
        members_ -= count;
        for (u64 i = 0; i < count; ++i) {
            u32 number = peek(words_ + start + i);
            every(number);
            u64 place = number < shape_.places ? peek(places_ + number) : 0;
            if ((place & kPlaceVisible) == 0) continue;
            u64 slot = place >> 32;
            if (slot >= shape_.nodes) continue;
            if (!peek(&nodes_[slot].known)) continue;
            visible(node_id(static_cast<u32>(slot), peek(&nodes_[slot].life)), static_cast<u32>(place & 0xFF));
        }
    }

private:
    static constexpr u64 kMostProbes = 4096;  // of four slots, for one key; clusters of a sound table are far shorter
    static constexpr int kMostAliases = 2;    // links of a chain, see sets.hpp

    u32 find(u64 key) {
        u64 at = home(key);
        for (u64 probes = 0; probes < kMostProbes && at + 4 <= shape_.total; ++probes) {
            const Slot* slot = slots_ + at;
            auto smaller = [&](int i) -> u64 { return peek(&slot[i].key) - 1 < key - 1; };  // as Table::seek
            u64 passed = smaller(0) + smaller(1) + smaller(2) + smaller(3);
            at += passed;
            if (passed < 4) return peek(&slots_[at].key) == key ? peek(&slots_[at].set) : 0;
        }
        sound_ = false;
        return 0;
    }

    u32 resolve(u32 id) {
        for (int link = 0; id && link <= kMostAliases; ++link) {
            if (id >= shape_.records) break;
            u32 next = peek(&records_[id].alias_of);
            if (next == 0) return peek(&records_[id].count) ? id : 0;
            id = next;
        }
        sound_ = sound_ && id == 0;
        return 0;
    }

    u64& members_;
    const Shape shape_;
    const Slot* slots_;
    const SetRecord* records_;
    const u32* words_;
    const u64* places_;
    const NodeEntry* nodes_;
    u32 named_ = 0, canonical_ = 0;
    bool sound_ = true;
};

}  // namespace kvdir
