// The floor that lookups are measured against: one random 16-byte read per fingerprint, prefetched, from a table as large
// as the index's, in memory of the same kind. For benchmarks only; nothing uses it otherwise.
#pragma once

#include "index.hpp"

namespace kvdir {

class GatherFloor {
public:
    explicit GatherFloor(u64 slots) : region_({4096, 4096, 4096, 4096, 4096, 4096, slots * sizeof(Slot)}), slots_(slots) {
        region_.commit(Segment::slots, slots * sizeof(Slot));
        for (u64 i = 0; i < slots; ++i) region_.at<Slot>(Segment::slots)[i] = {i, 1, 1};
    }

    // Sum of all that was read, so that nothing is optimised away.
    u64 read(const Fingerprints& blocks) const {
        KeyMix mix(0, 0);
        const Slot* table = region_.at<Slot>(Segment::slots);
        const Slot* places[kGroup];
        u64 sum = 0;
        for (u64 start = 0; start < blocks.count; start += kGroup) {
            u64 count = blocks.count - start < kGroup ? blocks.count - start : kGroup;
            for (u64 i = 0; i < count; ++i) {
                places[i] = table + static_cast<u64>((u128{mix(blocks.head(start + i))} * slots_) >> 64);
            }
            for (u64 i = 0; i < count && i < kAhead; ++i) __builtin_prefetch(places[i]);
            for (u64 i = 0; i < count; ++i) {
                if (i + kAhead < count) __builtin_prefetch(places[i + kAhead]);
                sum += places[i]->key + places[i]->set + places[i]->access;
            }
        }
        return sum;
    }

private:
    Region region_;
    u64 slots_;
};

}  // namespace kvdir
