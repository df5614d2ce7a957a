// Reading: sparse and prefix lookups, and the walk over all blocks. Nothing here writes to the region.
#include <algorithm>
#include <unordered_map>

#include "index.hpp"

namespace kvdir {

namespace {

// A prefix lookup probes every kStride-th block, and all blocks between two probes whose sets differ.
constexpr u64 kStride = 64;

// Numbers sets in order of appearance and copies their holders, which may change once the lock is gone.
class SetNumbers {
public:
    SetNumbers(const Sets& sets, SetList& list) : sets_(sets), list_(list) {}

    u32 number_of(u32 canonical) {
        auto [entry, fresh] = numbers_.try_emplace(canonical, static_cast<u32>(list_.ends.size()));
        if (fresh) {
            SetView view = sets_.view(canonical);
            list_.add(view.holders, view.holders + view.count);
        }
        return entry->second;
    }

private:
    const Sets& sets_;
    SetList& list_;
    std::unordered_map<u32, u32> numbers_;
};

// Slots name sets by raw ids; neighbours mostly name the same, which is then resolved once.
class Resolver {
public:
    explicit Resolver(const Sets& sets) : sets_(sets) {}

    u32 operator()(const Slot* slot) {
        if (!slot) return 0;
        if (slot->set != raw_) {
            raw_ = slot->set;
            canonical_ = sets_.resolve(raw_);
        }
        return canonical_;
    }

private:
    const Sets& sets_;
    u32 raw_ = 0;
    u32 canonical_ = 0;
};

class RunWriter {
public:
    RunWriter(const Sets& sets, Answer& answer) : numbers_(sets, answer.sets), answer_(answer) {}

    // Positions ascend; set 0 = miss. Neighbours with one set become one run.
    void add(u64 position, u64 count, u32 set) {
        if (set == 0) {
            set_ = 0;
            return;
        }
        answer_.hits += count;
        if (set == set_) {
            answer_.runs[answer_.runs.size() - 2] += static_cast<u32>(count);
            return;
        }
        set_ = set;
        u32 run[3] = {static_cast<u32>(position), static_cast<u32>(count), numbers_.number_of(set)};
        answer_.runs.insert(answer_.runs.end(), run, run + 3);
    }

private:
    SetNumbers numbers_;
    Answer& answer_;
    u32 set_ = 0;
};

// The longest prefix that one holder has in full, as far as it has been followed.
class Prefix {
public:
    Prefix(const Sets& sets, Answer& answer) : sets_(sets), runs_(sets, answer) {}

    u64 end() const { return end_; }
    u32 set() const { return set_; }

    // Goes on to `end` with blocks of this set; false when no holder of all blocks so far has them.
    bool extend(u64 end, u32 set) {
        if (set != set_ && !narrow(set)) return false;
        set_ = set;
        runs_.add(end_, end - end_, set);
        end_ = end;
        return true;
    }

private:
    bool narrow(u32 set) {
        if (set == 0) return false;
        SetView view = sets_.view(set);
        if (end_ == 0) {
            common_.assign(view.holders, view.holders + view.count);
            return view.count != 0;
        }
        std::vector<u32> both;
        std::set_intersection(common_.begin(), common_.end(), view.holders, view.holders + view.count,
                              std::back_inserter(both));
        if (both.empty()) return false;
        common_.swap(both);
        return true;
    }

    const Sets& sets_;
    RunWriter runs_;
    std::vector<u32> common_;  // holders of every block so far
    u64 end_ = 0;
    u32 set_ = 0;
};

}  // namespace

Answer Index::lookup_sparse(const Fingerprints& blocks, u64 scope) const {
    Answer answer;
    RunWriter runs(sets_, answer);
    Resolver resolve(sets_);
    find_each(table_, KeyMix(header().seed, scope), blocks,
              [&](u64 position, const Slot* slot) { runs.add(position, 1, resolve(slot)); });
    return answer;
}

Answer Index::lookup_prefix(const Fingerprints& blocks, u64 scope) const {
    Answer answer;
    if (blocks.count == 0) return answer;
    KeyMix mix(header().seed, scope);
    Prefix prefix(sets_, answer);
    Resolver resolve(sets_);
    auto key_at = [&](u64 position) { return mix(blocks.head(position)); };
    auto set_at = [&](u64 position) { return resolve(table_.find(key_at(position))); };

    // Every block from the end of the prefix up to and including `last`.
    auto follow = [&](u64 last) {
        for (u64 i = prefix.end(); i < last; ++i) table_.prefetch<Purpose::find>(key_at(i));
        for (u64 i = prefix.end(); i <= last; ++i) {
            if (!prefix.extend(i + 1, set_at(i))) return false;
        }
        return true;
    };

    if (!prefix.extend(1, set_at(0))) return answer;
    u64 final = blocks.count - 1;
    auto probe_at = [&](u64 number) { return std::min(number * kStride, final); };
    u64 probes = (final + kStride - 1) / kStride;
    for (u64 i = 1; i <= probes && i <= kAhead; ++i) table_.prefetch<Purpose::find>(key_at(probe_at(i)));
    for (u64 i = 1; i <= probes; ++i) {
        if (i + kAhead <= probes) table_.prefetch<Purpose::find>(key_at(probe_at(i + kAhead)));
        u64 position = probe_at(i);
        bool going = set_at(position) == prefix.set() ? prefix.extend(position + 1, prefix.set()) : follow(position);
        if (!going) break;
    }
    return answer;
}

DumpPage Index::dump(u64 cursor, u64 max_blocks) const {
    DumpPage page;
    SetNumbers numbers(sets_, page.sets);
    Resolver resolve(sets_);
    for (u64 at = table_.lower_bound(cursor); at < table_.total(); at = table_.skip_empty(at + 1)) {
        u32 set = resolve(&table_[at]);
        if (set == 0) continue;
        if (page.keys.size() == max_blocks) {
            page.next = table_[at].key;
            break;
        }
        page.keys.push_back(table_[at].key);
        page.numbers.push_back(numbers.number_of(set));
    }
    return page;
}

}  // namespace kvdir
