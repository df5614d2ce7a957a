#include "evict.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include "index.hpp"

namespace kvdir {

u64 Evictor::evict(u64 blocks) {
    u64 freed = 0;
    while (freed < blocks && table_.used()) {
        if (slots_left_ == 0) estimate();
        if (slots_left_ % kGroup == 0) region_.turn_section();
        if (hand_ >= table_.total()) hand_ = 0;
        --slots_left_;
        if (table_[hand_].key != 0 && visit(hand_)) {
            ++freed;  // what came after it may have moved to its place: look again
        } else {
            ++hand_;
        }
    }
    settle();
    return freed;
}

void Evictor::estimate() {
    const u64 total = table_.total();
    sample_.clear();
    for (u64 stretch = 0; stretch < kSampleStretches; ++stretch) {
        u64 from = scramble(++samples_) % total;
        for (u64 at = from; at < std::min(from + kStretchSlots, total); ++at) {
            if (table_[at].key != 0) sample_.push_back(table_[at].access);
        }
    }
    slots_left_ = total / 2 + 1;
    salt_ = static_cast<u32>(scramble(samples_));
    cutoff_ = at_cutoff_ = ~u32{0};
    if (sample_.empty()) return;  // next to nothing is left: anything may go
    const u64 wanted = sample_.size() / kOldestShare + 1;
    auto oldest = sample_.begin() + static_cast<long>(wanted - 1);
    std::nth_element(sample_.begin(), oldest, sample_.end());
    cutoff_ = *oldest;
    u64 before = 0, at = 0;
    for (u32 access : sample_) {
        before += access < cutoff_;
        at += access == cutoff_;
    }
    at_cutoff_ = static_cast<u32>(((wanted - before) << 32) / at - 1);
}

bool Evictor::is_old(const Slot& slot) const {
    return slot.access < cutoff_ || (slot.access == cutoff_ && static_cast<u32>(slot.key) + salt_ <= at_cutoff_);
}

bool Evictor::visit(u64 at) {
    const Slot slot = table_[at];
    const u32 set = sets_.resolve(slot.set);
    if (set && !is_old(slot)) return false;
    if (set) {
        if (set != named_) {
            settle();
            SetView view = sets_.view(set);
            number_ = evicted_.sets.add(view.holders, view.holders + view.count);
            named_ = set;
        }
        losing(slot.key);
    }
    table_.erase(at);
    sets_.release(slot.set, 1);
    return true;
}

void Evictor::lose(SetView set, u32 kept) {
    settle();
    std::vector<u32> others(set.holders, set.holders + set.count);
    others.erase(std::remove(others.begin(), others.end(), kept), others.end());
    number_ = evicted_.sets.add(others.data(), others.data() + others.size());
}

void Evictor::losing(u64 key) {
    evicted_.keys.push_back(key);
    evicted_.numbers.push_back(number_);
    ++pending_;
}

void Evictor::settle() noexcept {
    if (pending_) {
        const SetList& sets = evicted_.sets;
        for (u64 at = number_ ? sets.ends[number_ - 1] : 0; at < sets.ends[number_]; ++at) {
            sets_.count_holder(sets.holders[at], sets_.holder_blocks(sets.holders[at]) - pending_);
        }
    }
    pending_ = named_ = 0;
}

Evicted Evictor::take() {
    settle();
    return std::exchange(evicted_, {});
}

Evicted Index::make_room(u64 blocks, u32 holder) {
    if (!bounded_) return {};
    if (blocks == 0) return evictor_.take();
    if (blocks > table_.most()) throw std::bad_alloc();
    Section section(region_);
    if (!table_.fits(blocks)) sweep_slots(~u64{0}, kSweepPerBlock * blocks + kSweepAtLeast);
    while (!table_.fits(blocks) && table_.grow(blocks)) continue;
    if (!table_.fits(blocks)) evictor_.evict(table_.excess(blocks));
    while (!sets_.can_name(holder)) {
        if (evictor_.evict(kGroup) == 0) throw std::bad_alloc();
    }
    return evictor_.take();
}

}  // namespace kvdir
