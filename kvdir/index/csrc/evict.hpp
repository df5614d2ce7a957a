// What goes when an index with a bound is full: the blocks that were used least lately, near enough.
//
//   slots   |.......a....|..b.....c..|.......d...|      a hand goes round over the slots; what it meets that was last used
//                    hand ->                          before `cutoff` is evicted, everything else is left alone
//
// `cutoff` parts the oldest 1/kOldestShare from the rest, by a sample of the slots: keys are spread evenly over the table, so any
// stretch of it is an unbiased one. After half a round it is estimated anew. So a block that goes is, but for the error of
// the sample, among the oldest sixteenth of all, and a block evicted costs about sixteen slots looked at in sequence. Access
// is coarse: of blocks used just at `cutoff` a part chosen by their keys goes, because the hand must never empty a whole
// stretch; the table needs the same load everywhere.
// Exact order would cost two links in every slot (half as much memory again), or a queue.
//
// Besides, a set that no memory is left for is done without: a stored block then keeps only its newest holder, and a block
// whose set without a removed holder cannot be made goes altogether. What other holders lose by that is evicted, too.
// Everything evicted is listed by key and set, for those who count blocks per holder, until it is taken.
#pragma once

#include <vector>

#include "sets.hpp"
#include "table.hpp"

namespace kvdir {

// Sets that an answer names, numbered in order of appearance: holders of set i are holders[ends[i-1] .. ends[i]).
struct SetList {
    std::vector<u32> holders;
    std::vector<u64> ends;

    u32 add(const u32* first, const u32* last) {
        holders.insert(holders.end(), first, last);
        ends.push_back(holders.size());
        return static_cast<u32>(ends.size() - 1);
    }
};

// Block by block: the holders in set numbers[i] have lost keys[i].
struct Evicted {
    std::vector<u64> keys;
    std::vector<u32> numbers;
    SetList sets;
};

class Evictor {
public:
    static constexpr u64 kOldestShare = 16;     // the oldest 1/16 may go
    static constexpr u64 kSampleStretches = 64;  // of kStretchSlots each
    static constexpr u64 kStretchSlots = 16;

    Evictor(Region& region, Table& table, Sets& sets) : region_(region), table_(table), sets_(sets) {}
    Evictor(const Evictor&) = delete;
    Evictor& operator=(const Evictor&) = delete;

    // Empties at least so many slots, or all of them; dead blocks count, too. Returns how many.
    u64 evict(u64 blocks);

    // A batch could not make the set it needed, so the holders in `set` lose its next blocks, but for `kept`: `lose` once,
    // `losing` for each block, `settle` before the set can change.
    void lose(SetView set, u32 kept);
    void losing(u64 key);
    void settle() noexcept;

    Evicted take();  // everything that was listed since the last call

private:
    void estimate();
    bool is_old(const Slot& slot) const;
    bool visit(u64 at);  // true when the slot was emptied

    Region& region_;
    Table& table_;
    Sets& sets_;
    u64 hand_ = 0;
    u64 slots_left_ = 0;  // until the cutoff is estimated anew
    u32 cutoff_ = 0;
    u32 at_cutoff_ = 0;  // share of those used at the cutoff that may go, times 2^32
    u32 salt_ = 0;       // which ones
    u64 samples_ = 0;
    u32 named_ = 0;   // set id that `number_` stands for, 0 = none
    u32 number_ = 0;  // in `evicted_.sets`
    u32 pending_ = 0;  // blocks of that set that its holders have not been told to have lost
    Evicted evicted_;
    std::vector<u32> sample_;
};

}  // namespace kvdir
