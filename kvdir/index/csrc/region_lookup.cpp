// Lookups by a reader of a region: the same answers as Index gives, translated to nodes, from memory that changes meanwhile.
//
// Work goes in windows of up to kGroup blocks. What a window has read is used only if the sequence was even and the same before
// and after; otherwise it is read again, within the patience of the call, and then its blocks are misses and the answer says
// `torn`. So each run of an answer was true at one moment during the call; two runs may be of two moments.
// A window copies what it needs (holders with their nodes) and nothing else; numbering and merging happen behind it.
#include <algorithm>

#include "window.hpp"

namespace kvdir {

namespace {

constexpr u64 kReadAhead = 32;         // further than kAhead: small pages, so more misses of the TLB
constexpr u64 kStride = 64;            // of a prefix lookup, as in lookup.cpp
constexpr u64 kMostMembers = 1 << 22;  // holders that one call copies
constexpr u32 kRetryPauses = 16;
constexpr u32 kOpenPauses = 8;

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
            if (view_.stuck(sequence)) return false;
            if (patience_.wait(kOpenPauses)) continue;
            view_.found_stuck(sequence);
            return false;
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
            if (view_.unchanged(sequence) && window.sound()) return true;
        }
        sequence_ = 1;
        if (members_left_ == 0 || !patience_.wait(kRetryPauses)) return false;
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
