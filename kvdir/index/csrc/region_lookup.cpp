// Lookups by a reader of a region: the same answers as Index gives, translated to nodes, from memory that changes meanwhile.
//
// Work goes in windows of up to kGroup blocks. What a window has read is used only if the sequence was even and the same before
// and after; otherwise it is read again, within the patience of the call, and then its blocks are misses and the answer says
// `torn`. So each run of an answer was true at one moment during the call; two runs may be of two moments.
// A window copies what it needs (holders with their nodes) and nothing else; numbering and merging happen behind it.
#include <algorithm>

#include "view.hpp"

namespace kvdir {

namespace {




constexpr u32 kNone = ~u32{0};
constexpr u64 kReadAhead = 32;         // further than kAhead: small pages, so more misses of the TLB
constexpr u64 kStride = 64;            // of a prefix lookup, as in lookup.cpp
constexpr u64 kMostProbes = 4096;      // of four slots, for one key; clusters of a sound table are far shorter
constexpr u64 kMostMembers = 1 << 22;  // holders that one call copies
constexpr u32 kRetryPauses = 16;
constexpr u32 kOpenPauses = 8;
constexpr int kMostAliases = 2;  // links of a chain, see sets.hpp

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

struct Member {
    u32 node;  // node_id
    u32 tier;
};

// One set as a window has found it; a range of the call's `members`.
struct Found {
    u64 first, end;
    u32 number = kNone;  // in the answer, once it was asked for
};

class Call {
public:
    Call(const RegionView& view, const Fingerprints& blocks, u64 scope) : view_(view), blocks_(blocks), mix_(view.seed(), scope) {}

    RegionAnswer sparse();
    RegionAnswer prefix();

private:
    // Where a prefix lookup stands: all blocks before `end` are held by `common`; `set` is canonical, of the last one.
    struct Prefix {
        u64 end = 0;
        u64 probe = 1;
        u32 set = 0;
        bool going = true;
        std::vector<u32> common;
    };
    struct Stretch {
        u64 end;
        u32 found;
    };

    template <class Read>
    bool window(Read read);
    u32 found_in(Window& window, u32 canonical);
    bool narrow(Window& window, Prefix& state, u32 canonical);
    bool extend(Window& window, Prefix& state, u64 end, u64 key);
    void advance(Window& window, Prefix& state);
    u32 number_of(u32 found);
    u32 node_index(u32 node);
    void add(u64 position, u64 count, u32 number);
    u64 key_at(u64 position) const { return mix_(blocks_.head(position)); }

    const RegionView& view_;
    const Fingerprints& blocks_;
    const KeyMix mix_;
    RegionAnswer answer_;
    Patience patience_;
    u64 sequence_ = 1;  // for which `by_set_` and `found_` hold; odd: for none
    Numbers by_set_;    // canonical id -> index into found_
    std::vector<Found> found_;
    std::vector<Member> members_;
    u64 members_left_ = kMostMembers;
    std::vector<Stretch> stretches_;
    Numbers by_content_, by_node_;
    std::vector<u32> edited_;
    u64 last_end_ = 0;
    u32 last_number_ = kNone;
};

// Runs read(window) until what it read belongs together. False when that was not to be had.
template <class Read>
bool Call::window(Read read) {
    for (;;) {
        u64 sequence = view_.sequence();
        if (sequence & 1) {
            if (!patience_.wait(kOpenPauses)) return false;
            continue;
        }
        if (sequence != sequence_) {
            by_set_.clear();
            found_.clear();
            members_.clear();
            sequence_ = sequence;
        }
        Shape shape;
        if (view_.shape(shape)) {
            Window window(view_, shape, members_left_);
            read(window);
            if (members_left_ == 0) return false;
            if (view_.unchanged(sequence) && window.sound()) return true;
        }
        sequence_ = 1;
        if (!patience_.wait(kRetryPauses)) return false;
    }
}

u32 Call::found_in(Window& window, u32 canonical) {
    u32& at = by_set_[canonical];
    if (at != kNone) return at;
    at = static_cast<u32>(found_.size());
    u64 first = members_.size();
    window.holders(canonical, [](u32) {}, [&](u32 node, u32 tier) { members_.push_back({node, tier}); });
    found_.push_back({first, members_.size()});
    return at;
}

u32 Call::node_index(u32 node) {
    u32& at = by_node_[node];
    if (at == kNone) {
        at = static_cast<u32>(answer_.nodes.size());
        answer_.nodes.push_back(node);
    }
    return at;
}

// The set's number in the answer, kNone when nobody visible is in it. Equal sets have one number.
u32 Call::number_of(u32 found) {
    Found& set = found_[found];
    if (set.number != kNone || set.first == set.end) return set.number;
    edited_.clear();
    for (u64 i = set.first; i < set.end; ++i) edited_.push_back(node_index(members_[i].node) << 8 | members_[i].tier);
    std::sort(edited_.begin(), edited_.end());
    edited_.erase(std::unique(edited_.begin(), edited_.end()), edited_.end());
    u64 hash = edited_.size();
    for (u32 member : edited_) hash = scramble(hash + kGolden) ^ member;
    SetList& sets = answer_.sets;
    for (;; ++hash) {
        u32& number = by_content_[hash];
        if (number == kNone) {
            number = static_cast<u32>(sets.ends.size());
            sets.holders.insert(sets.holders.end(), edited_.begin(), edited_.end());
            sets.ends.push_back(sets.holders.size());
            return set.number = number;
        }
        auto begin = sets.holders.begin() + static_cast<long>(number ? sets.ends[number - 1] : 0);
        auto end = sets.holders.begin() + static_cast<long>(sets.ends[number]);
        if (std::equal(begin, end, edited_.begin(), edited_.end())) return set.number = number;
    }
}

void Call::add(u64 position, u64 count, u32 number) {
    if (number == kNone) return;
    answer_.hits += count;
    if (number == last_number_ && position == last_end_) {
        answer_.runs[answer_.runs.size() - 2] += static_cast<u32>(count);
    } else {
        u32 run[3] = {static_cast<u32>(position), static_cast<u32>(count), number};
        answer_.runs.insert(answer_.runs.end(), run, run + 3);
    }
    last_number_ = number;
    last_end_ = position + count;
}

RegionAnswer Call::sparse() {
    u64 keys[kGroup];
    u32 sets[kGroup];
    for (u64 start = 0; start < blocks_.count; start += kGroup) {
        u64 count = std::min(kGroup, blocks_.count - start);
        for (u64 i = 0; i < count; ++i) keys[i] = key_at(start + i);
        bool whole = window([&](Window& window) {
            for (u64 i = 0; i < count && i < kReadAhead; ++i) window.prefetch(keys[i]);
            u32 last = 0, found = kNone;
            for (u64 i = 0; i < count && window.sound(); ++i) {
                if (i + kReadAhead < count) window.prefetch(keys[i + kReadAhead]);
                u32 canonical = window.set_of(keys[i]);
                if (canonical != last) {
                    last = canonical;
                    found = canonical ? found_in(window, canonical) : kNone;
                }
                sets[i] = found;
            }
        });
        answer_.torn |= !whole;
        for (u64 i = 0, next; whole && i < count; i = next) {
            for (next = i + 1; next < count && sets[next] == sets[i];) ++next;
            if (sets[i] != kNone) add(start + i, next - i, number_of(sets[i]));
        }
    }
    return std::move(answer_);
}

// --- prefix: probes every kStride-th block, and all between two probes whose sets differ, as Index::lookup_prefix ------------

bool Call::narrow(Window& window, Prefix& state, u32 canonical) {
    if (canonical == 0) return false;
    std::vector<u32> holders, both;
    window.holders(canonical, [&](u32 number) { holders.push_back(number); }, [](u32, u32) {});
    if (state.end == 0) {
        state.common.swap(holders);
        return !state.common.empty();
    }
    // Ascending, both of them, unless what was read is torn; then the window is not used.
    std::set_intersection(state.common.begin(), state.common.end(), holders.begin(), holders.end(), std::back_inserter(both));
    state.common.swap(both);
    return !state.common.empty();
}

bool Call::extend(Window& window, Prefix& state, u64 end, u64 key) {
    u32 canonical = window.set_of(key);
    if (canonical != state.set || canonical == 0) {
        if (!narrow(window, state, canonical)) return state.going = false;
    }
    state.set = canonical;
    state.end = end;
    u32 found = found_in(window, canonical);
    if (!stretches_.empty() && stretches_.back().found == found) {
        stretches_.back().end = end;
    } else {
        stretches_.push_back({end, found});
    }
    return true;
}

// One window's share: about kGroup blocks looked at.
void Call::advance(Window& window, Prefix& state) {
    if (state.end == 0 && !extend(window, state, 1, key_at(0))) return;
    u64 final = blocks_.count - 1, probes = (final + kStride - 1) / kStride;
    auto probe_at = [&](u64 number) { return std::min(number * kStride, final); };
    for (u64 i = state.probe; i < state.probe + kAhead && i <= probes; ++i) window.prefetch(key_at(probe_at(i)));
    for (u64 looked = 0; looked < kGroup && state.probe <= probes; ++state.probe, ++looked) {
        if (state.probe + kAhead <= probes) window.prefetch(key_at(probe_at(state.probe + kAhead)));
        u64 position = probe_at(state.probe), key = key_at(position);
        if (window.set_of(key) == state.set) {
            if (!extend(window, state, position + 1, key)) return;
            continue;
        }
        for (u64 i = state.end; i < position; ++i) window.prefetch(key_at(i));
        for (u64 i = state.end; i <= position; ++i, ++looked) {
            if (!extend(window, state, i + 1, key_at(i))) return;
        }
    }
    state.going = state.probe <= probes;
}

RegionAnswer Call::prefix() {
    Prefix state;
    state.going = blocks_.count > 0;
    while (state.going) {
        Prefix next;
        u64 before = sequence_;
        bool whole = window([&](Window& window) {
            next = state;
            if (sequence_ != before) next.set = 0;  // the id may name another set by now
            stretches_.clear();
            advance(window, next);
        });
        if (!whole) {
            answer_.torn = true;
            break;
        }
        u64 start = state.end;
        state = std::move(next);
        for (const Stretch& stretch : stretches_) {
            u32 number = number_of(stretch.found);
            if (number == kNone) return std::move(answer_);  // nobody visible has it: the prefix ends here
            add(start, stretch.end - start, number);
            start = stretch.end;
        }
    }
    return std::move(answer_);
}

}  // namespace

RegionAnswer region_lookup(const RegionView& view, const Fingerprints& blocks, u64 scope, bool prefix) {
    Call call(view, blocks, scope);
    return prefix ? call.prefix() : call.sparse();
}

}  // namespace kvdir
