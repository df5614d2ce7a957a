// Interned holder sets: every distinct set of holders is stored once and named by its id, a record number.
//
//   records   | hash | chunk | count | refs | aliases | alias_of | next | generation |     32 bytes each; id 0 = no set
//                       \-> words: holder, holder, ... (u32, ascending)
//   buckets   chains of record ids by hash (`next`), grown one bucket at a time (linear hashing, Litwin 1980)
//
// A record is in exactly one of four states:
//   canonical  count > 0, in its bucket; the only record with this content
//   alias      alias_of = a canonical record with the same content. `drop` makes two sets equal by taking a holder from one;
//              their blocks keep both ids, and an equal content stays equal under later drops, so an alias never ends
//   dead       count = 0, refs > 0, alias_of = 0: its last holder was dropped; blocks that name it are misses waiting to be swept
//   free       refs = 0 and aliases = 0, in the free list
//
// Invariants: refs = slots that name the record; aliases = records whose alias_of it is; alias_of always names a canonical
// record (chains are flattened before `drop` ends; within a drop they have at most two links, because a set that others become
// equal to lacks the dropped holder and so stays as it is); `dead_blocks` = sum of refs over dead records.
// `holders` is the number of blocks of each holder, kept exactly, so it costs nothing to ask.
//
// Adding and taking a holder is remembered in a small direct-mapped memo; an entry is good only while both records have
// the generation it saw, and no holder was dropped since.
#pragma once

#include <vector>

#include "pool.hpp"

namespace kvdir {

constexpr u32 kHolderLimit = u32{1} << 24;

struct SetRecord {
    u32 hash;
    u32 chunk;
    u32 count;
    u32 refs;
    u32 aliases;
    u32 alias_of;
    u32 next;  // in the bucket, or in the free list
    u32 generation;
};
static_assert(sizeof(SetRecord) == 32);

struct SetsState {
    u32 records;          // ids below have been used at least once
    u32 free;             // first free record, 0 = none
    u32 canonical;        // distinct sets
    u32 aliases;          // alias records
    u32 buckets;          // in use
    u32 holders;          // holders with at least one block
    u64 dead_blocks;
    u64 holder_pages;     // pages of the holders segment that were written to
    u64 holder_page_map[kHolderLimit / 1024 / 64];  // which ones
};

struct SetView {
    const u32* holders;
    u32 count;
};

// What adding or taking a holder does to the blocks of a set.
struct Step {
    u32 to;         // set afterwards; 0 = the block has no holder left
    bool changes;   // false: it had (or lacked) the holder already
};

class Sets {
public:
    Sets(Region& region, SetsState& state, PoolState& pool);
    Sets(const Sets&) = delete;
    Sets& operator=(const Sets&) = delete;

    void create();  // once

    // Canonical id of the set that a slot names; 0 when the set is dead or the id out of range.
    u32 resolve(u32 id) const {
        if (id >= state_.records) return 0;
        if (records_[id].alias_of) id = records_[id].alias_of;
        return id < state_.records && records_[id].count ? id : 0;
    }
    SetView view(u32 canonical) const {
        const SetRecord& record = records_[canonical];
        if (!pool_.holds(record.chunk, record.count)) return {nullptr, 0};
        return {pool_.words(record.chunk), record.count};
    }

    // Neither counts references; they may throw std::bad_alloc, and then nothing has changed.
    Step plus(u32 id, u32 holder) { return change(id, holder, true); }
    Step minus(u32 id, u32 holder) { return change(id, holder, false); }

    void acquire(u32 id, u32 count) noexcept { records_[id].refs += count; }
    void release(u32 id, u32 count) noexcept;

    // Takes the holder from every set: O(records). Slots are not touched.
    void drop(u32 holder);

    u32 holder_blocks(u32 holder) const;
    void reserve_holder(u32 holder);  // before count_holder, which then cannot fail

    // Whether memory is left for the set {holder}, which a batch of that holder needs whatever comes.
    bool can_name(u32 holder) noexcept;
    void count_holder(u32 holder, u32 blocks) noexcept;  // the holder has this many blocks now

    u64 dead_blocks() const { return state_.dead_blocks; }
    u32 distinct() const { return state_.canonical; }
    u32 live_holders() const { return state_.holders; }
    u32 refs(u32 id) const { return records_[id].refs; }
    u64 private_bytes() const { return memo_.capacity() * sizeof(Memo); }
    const char* fault() const;  // checks the invariants above; for tests

private:
    struct Memo {
        u32 from, from_generation, to, to_generation, drops;
        u32 holder;  // and kAdding
        bool changes;
    };

    u32 bucket_of(u32 hash) const;
    void link(u32 id) noexcept;
    void unlink(u32 id) noexcept;
    void split_bucket();
    u32 intern(u32 hash, SetView set);
    u32 equal_to(u32 hash, SetView set) const;
    Step change(u32 id, u32 holder, bool adding);
    Step compute(u32 id, u32 holder, bool adding);
    u32 take_record();
    void free_record(u32 id) noexcept;
    void drop_from(u32 id, const u32* place) noexcept;
    void settle_aliases() noexcept;

    Region& region_;
    SetsState& state_;
    Pool pool_;
    SetRecord* records_;
    u32* buckets_;
    u32* holders_;
    u32 drops_ = 0;
    std::vector<Memo> memo_;
    std::vector<u32> edited_;  // scratch of compute
};

}  // namespace kvdir
