#include "index.hpp"

#include <algorithm>

#include "roster.hpp"

namespace kvdir {

namespace {

// Address space per segment. Only what is written to costs memory.
constexpr u64 kReserve[] = {
    4096,                              // header
    u64{kHolderLimit} * sizeof(u32),   // holders: 64 MiB
    (u64{1} << 27) * sizeof(SetRecord),  // records: 4 GiB
    (u64{1} << 27) * sizeof(u32),      // buckets: 512 MiB
    (u64{1} << 30) * 16,               // words: 16 GiB
    (u64{1} << 30) / 8,                // word map: 128 MiB
    (u64{1} << 32) * sizeof(Slot),     // slots: 64 GiB, 3.4 G blocks
    u64{kHolderLimit} * sizeof(u64),   // places: 128 MiB
    kNodeLimit * sizeof(NodeEntry),    // nodes: 64 MiB
    kNamespaceBytes,
    kBeatBytes,
};
static_assert(sizeof kReserve == kSegments * sizeof(u64));

constexpr u64 kSweepSection = 256;  // slots looked at in one section

// Of a bound, this share is kept from the slots for what else there is.
constexpr u64 kSetsShare = 8;
constexpr u64 kSetsAtLeast = 4 * 4096;

}  // namespace

Index::Index(u64 expected_blocks, u64 seed, u64 max_bytes)
    : region_(kReserve),
      table_(region_, region_.at<IndexHeader>(Segment::header)->table),
      sets_(region_, region_.at<IndexHeader>(Segment::header)->sets, region_.at<IndexHeader>(Segment::header)->pool),
      bounded_(max_bytes != 0),
      evictor_(region_, table_, sets_) {
    create(expected_blocks, seed, max_bytes);
}

Index::Index(const RegionPlace& place, u64 expected_blocks, u64 seed)
    : region_(kReserve, place),
      table_(region_, region_.at<IndexHeader>(Segment::header)->table),
      sets_(region_, region_.at<IndexHeader>(Segment::header)->sets, region_.at<IndexHeader>(Segment::header)->pool),
      bounded_(place.max_bytes != 0),
      evictor_(region_, table_, sets_) {
    try {
        create(expected_blocks, seed, place.max_bytes);
        Roster(region_).create();
    } catch (const std::bad_alloc&) {
        throw RegionError(region_.file()->no_room());
    }
}

void Index::create(u64 expected_blocks, u64 seed, u64 max_bytes) {
    header().seed = seed;
    if (bounded_) {
        u64 fixed = region_.extent(Segment::header).committed_bytes + sets_.private_bytes();
        u64 spare = max_bytes - std::min(max_bytes, fixed);
        u64 sets = spare / kSetsShare + kSetsAtLeast;
        region_.set_spare(spare);
        table_.set_limit(spare - std::min(spare, sets));
    }
    table_.create(expected_blocks);
    sets_.create();
}

// One batch of one holder. Neighbouring blocks mostly share a set, so a step (old set -> new set) is worked out when the old
// set changes, and its references are counted once per run. The set {holder} is held for the whole batch: new blocks
// name it without asking.
class Index::Batch {
public:
    Batch(Sets& sets, Evictor* evictor, u32 holder, bool adding)
        : sets_(sets), evictor_(evictor), holder_(holder), adding_(adding) {
        sets_.reserve_holder(holder);
        if (!adding) return;
        alone_ = sets_.plus(0, holder).to;
        sets_.acquire(alone_, 1);
        step_ = {alone_, true};
    }
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;
    ~Batch() {
        settle();
        sets_.release(alone_, 1);
        u64 before = sets_.holder_blocks(holder_);
        sets_.count_holder(holder_, static_cast<u32>(adding_ ? before + changed_ : before - changed_));
    }

    Step step(u32 from, u64 key) {
        if (from != from_) turn(from);
        if (narrow_) evictor_->losing(key);
        ++pending_;
        changed_ += step_.changes;
        return step_;
    }
    // Whether the block had no holder before: it is new, or dead.
    bool is_first(Step step) const { return step.changes && step.to == alone_; }
    u64 changed() const { return changed_; }

    // Counts the references of the run so far.
    void settle() noexcept {
        if (pending_ && from_ != step_.to) {
            if (step_.to) sets_.acquire(step_.to, pending_);
            sets_.release(from_, pending_);
        }
        if (narrow_) evictor_->settle();
        narrow_ = false;
        pending_ = 0;
        from_ = 0;
        step_ = {alone_, adding_};
    }

private:
    // Settles first: that may free sets, and the next step must not name one of them.
    void turn(u32 from) {
        settle();
        try {
            step_ = adding_ ? (from ? sets_.plus(from, holder_) : Step{alone_, true}) : sets_.minus(from, holder_);
        } catch (const std::bad_alloc&) {
            if (!evictor_) throw;
            step_ = {alone_, true};
            evictor_->lose(sets_.view(sets_.resolve(from)), holder_);
            narrow_ = true;
        }
        from_ = from;
    }

    Sets& sets_;
    Evictor* const evictor_;  // of an index with a bound, which does without a set that there is no memory for
    const u32 holder_;
    const bool adding_;
    u32 alone_ = 0;
    u32 from_ = 0;
    Step step_{0, false};
    u32 pending_ = 0;
    u64 changed_ = 0;
    bool narrow_ = false;
};

u64 Index::store(const Fingerprints& blocks, u64 scope, u32 holder, u32 now_s, Sketch* sketch) {
    Section section(region_);
    u64 changed;
    {
        Batch batch(sets_, bounded_ ? &evictor_ : nullptr, holder, true);
        auto reserve = [&](u64 count) {
            batch.settle();
            region_.turn_section();
            if (!table_.fits(count)) sweep_slots(~u64{0}, kSweepPerBlock * count);  // room of dead blocks before new room
            table_.reserve(count);
        };
        for_each_key<Purpose::put>(table_, KeyMix(header().seed, scope), blocks, reserve, [&](u64 position, u64 key) {
            Slot* slot = table_.put(key);
            Step step = batch.step(slot->set, key);
            slot->set = step.to;
            slot->access = batch.is_first(step) ? now_s : std::max(slot->access, now_s);
            if (step.changes && sketch) sketch->insert_one(blocks.at(position), blocks.width);
        });
        changed = batch.changed();
    }
    sweep_after(blocks.count);
    return changed;
}

u64 Index::remove(const Fingerprints& blocks, u64 scope, u32 holder, Sketch* sketch) {
    if (sets_.holder_blocks(holder) == 0) return 0;
    Section section(region_);
    u64 changed;
    {
        Batch batch(sets_, bounded_ ? &evictor_ : nullptr, holder, false);
        auto turn = [&](u64) { region_.turn_section(); };
        for_each_key<Purpose::find>(table_, KeyMix(header().seed, scope), blocks, turn, [&](u64 position, u64 key) {
            Slot* slot = table_.find(key);
            if (!slot) return;
            Step step = batch.step(slot->set, slot->key);
            if (step.to) {
                slot->set = step.to;
            } else {
                table_.erase(table_.index_of(slot));
            }
            if (step.changes && sketch) sketch->remove_one(blocks.at(position), blocks.width);
        });
        changed = batch.changed();
    }
    sweep_after(blocks.count);
    return changed;
}

void Index::touch(const Fingerprints& blocks, u64 scope, u32 now_s) {
    find_each(table_, KeyMix(header().seed, scope), blocks, [&](u64, Slot* slot) {
        if (slot) slot->access = std::max(slot->access, now_s);
    });
}

void Index::last_access(const Fingerprints& blocks, u64 scope, u32* out) const {
    find_each(table_, KeyMix(header().seed, scope), blocks, [&](u64 position, const Slot* slot) {
        out[position] = slot && sets_.resolve(slot->set) ? slot->access : 0;
    });
}

void Index::keys(const Fingerprints& blocks, u64 scope, u64* out) const {
    KeyMix mix(header().seed, scope);
    for (u64 i = 0; i < blocks.count; ++i) out[i] = mix(blocks.head(i));
}

void Index::heads(const Fingerprints& keys, u64 scope, u64* out) const {
    KeyMix mix(header().seed, scope);
    for (u64 i = 0; i < keys.count; ++i) out[i] = mix.inverse(keys.head(i));
}

void Index::key_access(const Fingerprints& keys, u32* out) const {
    for (u64 i = 0; i < keys.count; ++i) {
        const Slot* slot = keys.head(i) ? table_.find(keys.head(i)) : nullptr;
        out[i] = slot && sets_.resolve(slot->set) ? slot->access : 0;
    }
}

// Like `store`, by key: the keys were made with our seed. Key 0 means an empty slot and is passed over.
u64 Index::restore(const Fingerprints& keys, const u8* access, u32 holder) {
    Section section(region_);
    Batch batch(sets_, bounded_ ? &evictor_ : nullptr, holder, true);
    for (u64 start = 0; start < keys.count; start += kGroup) {
        u64 end = std::min(start + kGroup, keys.count);
        batch.settle();
        region_.turn_section();
        table_.reserve(end - start);
        for (u64 i = start; i < end; ++i) {
            if (keys.head(i) == 0) continue;
            u32 then_s;
            std::memcpy(&then_s, access + i * sizeof then_s, sizeof then_s);
            Slot* slot = table_.put(keys.head(i));
            Step step = batch.step(slot->set, slot->key);
            slot->set = step.to;
            slot->access = batch.is_first(step) ? then_s : std::max(slot->access, then_s);
        }
    }
    return batch.changed();
}

u64 Index::drop(u32 holder) {
    u64 blocks = sets_.holder_blocks(holder);
    if (!blocks) return 0;
    Section section(region_);
    sets_.drop(holder);
    return blocks;
}

void Index::sweep_after(u64 batch_blocks) { sweep_slots(~u64{0}, kSweepPerBlock * batch_blocks + kSweepAtLeast); }

// Erasing shifts the next block into the place, so the place is looked at again. Aliases met on the way are replaced by the
// set they stand for, so they die out.
u64 Index::sweep_slots(u64 max_blocks, u64 max_slots) {
    u64 freed = 0;
    u64& at = header().sweep_at;
    for (u64 seen = 0; seen < max_slots && freed < max_blocks && sets_.dead_blocks(); ++seen) {
        if (seen % kSweepSection == 0) region_.turn_section();
        if (at >= table_.total()) at = 0;
        Slot& slot = table_[at];
        u32 named = slot.key ? slot.set : 0;
        u32 set = named ? sets_.resolve(named) : 0;
        if (named == set) {  // empty, or as it should be
            ++at;
        } else if (set) {
            slot.set = set;
            sets_.acquire(set, 1);
            sets_.release(named, 1);
            ++at;
        } else {
            table_.erase(at);
            sets_.release(named, 1);
            ++freed;
        }
    }
    return freed;
}

Stats Index::stats() const {
    u64 bytes = sets_.private_bytes();
    for (Segment segment = Segment::header; segment < Segment::places; segment = static_cast<Segment>(static_cast<u32>(segment) + 1)) {
        bytes += region_.is_sparse(segment) ? header().sets.holder_pages * 4096 : region_.extent(segment).committed_bytes;
    }
    return {table_.used() - sets_.dead_blocks(), table_.capacity(), bytes, sets_.distinct(), sets_.live_holders(),
            table_.growing()};
}

const char* Index::fault() const {
    if (const char* wrong = table_.fault()) return wrong;
    if (const char* wrong = sets_.fault()) return wrong;
    std::vector<u32> refs(header().sets.records);
    for (u64 at = 0; at < table_.total(); ++at) {
        if (table_[at].key == 0) continue;
        if (table_[at].set == 0 || table_[at].set >= refs.size()) return "a slot names no set";
        ++refs[table_[at].set];
    }
    for (u32 id = 1; id < refs.size(); ++id) {
        if (refs[id] != sets_.refs(id)) return "references are miscounted";
    }
    return nullptr;
}

}  // namespace kvdir
