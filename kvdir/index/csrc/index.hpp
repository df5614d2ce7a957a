// The block index: which holders have which block. Puts the table (key -> set id) and the sets (id -> holders) together.
//
//   fingerprint --KeyMix(seed, scope)--> key --Table--> slot { set id, last access } --Sets--> holders, ascending
//
// Rules: batches in, packed answers out; no clock, no I/O, no Python. Not thread-safe: the caller holds one lock per index.
// A slot's set id counts as one reference of that record. Blocks whose set is dead (holder dropped) stay in the table until
// a later batch or `sweep` comes by; nothing but `used` can tell.
// If memory is exhausted, std::bad_alloc leaves the batch half applied but everything consistent and counted.
// What changes blocks or sets does so in sections of the region, of a group of blocks or a few hundred records each; a last
// access is written without, since readers of the region do not look at it.
// An index with a bound (`max_bytes`) never takes more: see evict.hpp for what goes when it is full.
#pragma once

#include <vector>

#include "evict.hpp"
#include "mix.hpp"
#include "region_file.hpp"
#include "sets.hpp"
#include "sketch.hpp"
#include "table.hpp"

namespace kvdir {

// First segment of the region.
struct IndexHeader {
    RegionHeader region;
    u64 seed;
    u64 sweep_at;  // slot where the next sweep goes on
    TableState table;
    PoolState pool;
    SetsState sets;
};
static_assert(sizeof(IndexHeader) <= 4096, "the header is one page");

struct Answer {
    std::vector<u32> runs;  // (start, count, set) triples
    SetList sets;
    u64 hits = 0;
};

struct DumpPage {
    u64 next = 0;  // cursor, 0 at the end
    std::vector<u64> keys;
    std::vector<u32> numbers;
    SetList sets;
};

struct Stats {
    u64 blocks, capacity, bytes, sets, holders;
    bool growing;
};

class Index {
public:
    static constexpr u64 kLeastBytes = u64{128} << 10;  // the smallest bound; room for 3,000 blocks

    // max_bytes: `stats().bytes` never rises above it; at least kLeastBytes, or 0 for no bound.
    Index(u64 expected_blocks, u64 seed, u64 max_bytes = 0);
    Index(const RegionPlace& place, u64 expected_blocks, u64 seed);  // in a file, with a roster; not published yet

    u64 store(const Fingerprints& blocks, u64 scope, u32 holder, u32 now_s, Sketch* sketch);
    u64 remove(const Fingerprints& blocks, u64 scope, u32 holder, Sketch* sketch);

    Answer lookup_sparse(const Fingerprints& blocks, u64 scope) const;
    Answer lookup_prefix(const Fingerprints& blocks, u64 scope) const;
    void touch(const Fingerprints& blocks, u64 scope, u32 now_s);
    void last_access(const Fingerprints& blocks, u64 scope, u32* out) const;
    void keys(const Fingerprints& blocks, u64 scope, u64* out) const;

    // The same by key, for those who have no fingerprints: a walk over `dump`, and a checkpoint of an index with our seed.
    void key_access(const Fingerprints& keys, u32* out) const;
    u64 restore(const Fingerprints& keys, const u8* access, u32 holder);
    void heads(const Fingerprints& keys, u64 scope, u64* out) const;  // the inverse of `keys`

    // Evicts until the holder can be given `blocks` more. Returns everything that was evicted since the last call. Throws
    // std::bad_alloc, and evicts nothing, when not even an empty index could hold so many.
    Evicted make_room(u64 blocks, u32 holder);

    u64 drop(u32 holder);
    u64 holder_blocks(u32 holder) const { return sets_.holder_blocks(holder); }
    u64 sweep(u64 max_blocks) {
        Section section(region_);
        return sweep_slots(max_blocks, 2 * table_.total());
    }

    // Blocks in key order from the cursor on. The cursor is a key, so growing meanwhile changes nothing: a block that is
    // present during the whole walk appears exactly once.
    DumpPage dump(u64 cursor, u64 max_blocks) const;

    Stats stats() const;
    Region& region() { return region_; }
    const Region& region() const { return region_; }
    const char* fault() const;  // checks every invariant; for tests

private:
    class Batch;

    void create(u64 expected_blocks, u64 seed, u64 max_bytes);
    IndexHeader& header() const { return *region_.at<IndexHeader>(Segment::header); }
    u64 sweep_slots(u64 max_blocks, u64 max_slots);
    void sweep_after(u64 batch_blocks);

    Region region_;
    Table table_;
    Sets sets_;
    const bool bounded_;
    Evictor evictor_;
};

constexpr u64 kGroup = 256;
constexpr u64 kAhead = 16;

// Slots that a batch looks at per block, and at least, while dead blocks wait to be swept.
constexpr u64 kSweepPerBlock = 8;
constexpr u64 kSweepAtLeast = 64;

// Calls visit(position, key) for each block, with the table's lines on their way kAhead blocks earlier, and before(count)
// ahead of each group of up to kGroup blocks.
template <Purpose purpose, class Before, class Visit>
void for_each_key(const Table& table, KeyMix mix, const Fingerprints& blocks, Before before, Visit visit) {
    u64 keys[kGroup];
    for (u64 start = 0; start < blocks.count; start += kGroup) {
        u64 count = blocks.count - start < kGroup ? blocks.count - start : kGroup;
        before(count);
        for (u64 i = 0; i < count; ++i) keys[i] = mix(blocks.head(start + i));
        for (u64 i = 0; i < count && i < kAhead; ++i) table.prefetch<purpose>(keys[i]);
        for (u64 i = 0; i < count; ++i) {
            if (i + kAhead < count) table.prefetch<purpose>(keys[i + kAhead]);
            visit(start + i, keys[i]);
        }
    }
}

// Calls visit(position, slot) for each block, with nullptr for those that are not there.
template <class Visit>
void find_each(const Table& table, KeyMix mix, const Fingerprints& blocks, Visit visit) {
    for_each_key<Purpose::find>(table, mix, blocks, [](u64) {}, [&](u64 position, u64 key) { visit(position, table.find(key)); });
}

}  // namespace kvdir
