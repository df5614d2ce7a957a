#include "sets.hpp"

#include <algorithm>
#include <cstring>

#include "mix.hpp"

namespace kvdir {

namespace {

constexpr u32 kMemoEntries = 1024;
constexpr u32 kAdding = u32{1} << 31;
constexpr u32 kFirstBuckets = 64;
constexpr u32 kHoldersPerPage = 1024;
constexpr u32 kDropSection = 256;  // records that one section of a drop looks at; in between an alias may name an alias

// The hash of a set is the sum over its holders, so that one holder more or less costs one addition.
u32 hash_of(u32 holder) { return static_cast<u32>(scramble(holder + kGolden)); }

const u32* place_of(SetView set, u32 holder) { return std::lower_bound(set.holders, set.holders + set.count, holder); }

bool has(SetView set, const u32* place, u32 holder) { return place != set.holders + set.count && *place == holder; }

}  // namespace

Sets::Sets(Region& region, SetsState& state, PoolState& pool)
    : region_(region),
      state_(state),
      pool_(region, pool),
      records_(region.at<SetRecord>(Segment::records)),
      buckets_(region.at<u32>(Segment::buckets)),
      holders_(region.at<u32>(Segment::holders)),
      memo_(kMemoEntries) {}

void Sets::create() {
    region_.commit(Segment::records, sizeof(SetRecord));
    region_.commit(Segment::buckets, kFirstBuckets * sizeof(u32));
    state_.records = 1;
    state_.buckets = kFirstBuckets;
    pool_.create();
}

// --- buckets -------------------------------------------------------------------------------------------------------------

u32 Sets::bucket_of(u32 hash) const {
    u32 level = u32{1} << (31 - __builtin_clz(state_.buckets));
    u32 bucket = hash & (2 * level - 1);
    return bucket < state_.buckets ? bucket : hash & (level - 1);
}

void Sets::link(u32 id) noexcept {
    u32& head = buckets_[bucket_of(records_[id].hash)];
    records_[id].next = head;
    head = id;
}

void Sets::unlink(u32 id) noexcept {
    u32* link = &buckets_[bucket_of(records_[id].hash)];
    while (*link != id) link = &records_[*link].next;
    *link = records_[id].next;
}

void Sets::split_bucket() {
    u32 fresh = state_.buckets;
    region_.commit(Segment::buckets, (u64{fresh} + 1) * sizeof(u32));
    u32 level = u32{1} << (31 - __builtin_clz(fresh));
    u32 id = buckets_[fresh - level];
    buckets_[fresh - level] = buckets_[fresh] = 0;
    state_.buckets = fresh + 1;
    while (id) {
        u32 next = records_[id].next;
        link(id);
        id = next;
    }
}

u32 Sets::equal_to(u32 hash, SetView set) const {
    for (u32 id = buckets_[bucket_of(hash)]; id; id = records_[id].next) {
        const SetRecord& record = records_[id];
        if (record.hash != hash || record.count != set.count) continue;
        if (std::memcmp(pool_.words(record.chunk), set.holders, set.count * sizeof(u32)) == 0) return id;
    }
    return 0;
}

// --- records -------------------------------------------------------------------------------------------------------------

u32 Sets::take_record() {
    if (u32 id = state_.free) {
        state_.free = records_[id].next;
        return id;
    }
    region_.commit(Segment::records, (u64{state_.records} + 1) * sizeof(SetRecord));
    return state_.records++;
}

void Sets::free_record(u32 id) noexcept {
    SetRecord& record = records_[id];
    u32 target = record.alias_of;
    if (record.count) {
        unlink(id);
        pool_.release(record.chunk, Pool::order_of(record.count));
        --state_.canonical;
    }
    record = {0, 0, 0, 0, 0, 0, state_.free, record.generation + 1};
    state_.free = id;
    if (!target) return;
    --state_.aliases;
    if (--records_[target].aliases == 0 && records_[target].refs == 0) free_record(target);
}

void Sets::release(u32 id, u32 count) noexcept {
    if (id == 0) return;
    SetRecord& record = records_[id];
    record.refs -= count;
    if (record.count == 0 && record.alias_of == 0) state_.dead_blocks -= count;
    if (record.refs == 0 && record.aliases == 0) free_record(id);
}

u32 Sets::intern(u32 hash, SetView set) {
    if (u32 id = equal_to(hash, set)) return id;
    if (state_.canonical >= state_.buckets) split_bucket();
    u32 order = Pool::order_of(set.count);
    u32 chunk = pool_.allocate(order);
    u32 id;
    try {
        id = take_record();
    } catch (...) {
        pool_.release(chunk, order);
        throw;
    }
    std::memcpy(pool_.words(chunk), set.holders, set.count * sizeof(u32));
    records_[id] = {hash, chunk, set.count, 0, 0, 0, 0, records_[id].generation};
    link(id);
    ++state_.canonical;
    return id;
}

// --- adding and taking a holder ------------------------------------------------------------------------------------------

Step Sets::change(u32 id, u32 holder, bool adding) {
    u32 tagged = holder | (adding ? kAdding : 0);
    Memo& memo = memo_[scramble(u64{id} << 32 | tagged) % kMemoEntries];
    if (memo.from == id && memo.holder == tagged && memo.drops == drops_ &&
        memo.from_generation == records_[id].generation && memo.to_generation == records_[memo.to].generation) {
        return {memo.to, memo.changes};
    }
    Step step = compute(id, holder, adding);
    memo = {id, records_[id].generation, step.to, records_[step.to].generation, drops_, tagged, step.changes};
    return step;
}

Step Sets::compute(u32 id, u32 holder, bool adding) {
    u32 canonical = resolve(id);
    SetView set = canonical ? view(canonical) : SetView{nullptr, 0};
    const u32* place = place_of(set, holder);
    if (has(set, place, holder) == adding) return {canonical, false};
    u32 hash = canonical ? records_[canonical].hash : 0;
    edited_.assign(set.holders, place);
    if (adding) {
        edited_.push_back(holder);
        edited_.insert(edited_.end(), place, set.holders + set.count);
        return {intern(hash + hash_of(holder), {edited_.data(), set.count + 1}), true};
    }
    if (set.count == 1) return {0, true};
    edited_.insert(edited_.end(), place + 1, set.holders + set.count);
    return {intern(hash - hash_of(holder), {edited_.data(), set.count - 1}), true};
}

// --- dropping a holder ---------------------------------------------------------------------------------------------------

void Sets::drop(u32 holder) {
    ++drops_;
    for (u32 id = 1; id < state_.records; ++id) {
        if (id % kDropSection == 0) region_.turn_section();
        if (records_[id].count == 0) continue;
        SetView set = view(id);
        const u32* place = place_of(set, holder);
        if (has(set, place, holder)) drop_from(id, place);
    }
    if (state_.aliases) settle_aliases();
    count_holder(holder, 0);
}

// A set that shrinks across a power of two gives the upper half of its words back. A set that becomes equal to another
// becomes its alias: the other lacks the holder, so this drop does not change it any more.
void Sets::drop_from(u32 id, const u32* place) noexcept {
    SetRecord& record = records_[id];
    unlink(id);
    u32* words = pool_.words(record.chunk);
    u32 index = static_cast<u32>(place - words);
    record.hash -= hash_of(*place);
    std::memmove(words + index, words + index + 1, (record.count - index - 1) * sizeof(u32));
    u32 order = Pool::order_of(record.count);
    --record.count;
    u32 target = record.count ? equal_to(record.hash, {words, record.count}) : 0;
    if (record.count && !target) {
        if (Pool::order_of(record.count) < order) pool_.release(record.chunk + (1u << (order - 1)), order - 1);
        link(id);
        return;
    }
    pool_.release(record.chunk, order);
    record.chunk = record.count = 0;
    --state_.canonical;
    if (target) {
        record.alias_of = target;
        ++records_[target].aliases;
        ++state_.aliases;
    } else {
        state_.dead_blocks += record.refs;
    }
}

// After a drop an alias may name a set that is dead or an alias itself: name the end of the chain, or die with it.
void Sets::settle_aliases() noexcept {
    for (u32 id = 1; id < state_.records; ++id) {
        if (id % kDropSection == 0) region_.turn_section();
        u32 before = records_[id].alias_of;
        if (!before) continue;
        u32 end = before;
        while (records_[end].alias_of) end = records_[end].alias_of;
        bool dead = records_[end].count == 0;
        if (end == before && !dead) continue;
        records_[id].alias_of = dead ? 0 : end;
        if (dead) {
            state_.dead_blocks += records_[id].refs;
            --state_.aliases;
        } else {
            ++records_[end].aliases;
        }
        // A set that only aliases kept alive has lost its last one here.
        if (--records_[before].aliases == 0 && records_[before].refs == 0) free_record(before);
    }
}

// --- blocks of a holder --------------------------------------------------------------------------------------------------

u32 Sets::holder_blocks(u32 holder) const {
    bool committed = holder < region_.extent(Segment::holders).committed_bytes / sizeof(u32);
    return committed ? holders_[holder] : 0;
}

void Sets::reserve_holder(u32 holder) {
    region_.commit(Segment::holders, (u64{holder} + 1) * sizeof(u32));
    u32 page = holder / kHoldersPerPage;
    u64 bit = u64{1} << (page % 64);
    if (state_.holder_page_map[page / 64] & bit) return;
    if (region_.is_sparse(Segment::holders)) region_.charge(kHoldersPerPage * sizeof(u32));
    state_.holder_page_map[page / 64] |= bit;
    ++state_.holder_pages;
}

bool Sets::can_name(u32 holder) noexcept {
    try {
        reserve_holder(holder);
        u32 id = plus(0, holder).to;
        acquire(id, 1);
        release(id, 1);
        return true;
    } catch (const std::bad_alloc&) {
        return false;
    }
}

void Sets::count_holder(u32 holder, u32 blocks) noexcept {
    u32 before = holder_blocks(holder);
    if (before == blocks) return;
    state_.holders += (before == 0) - (blocks == 0);
    holders_[holder] = blocks;
}

// --- for tests -----------------------------------------------------------------------------------------------------------

const char* Sets::fault() const {
    u32 canonical = 0, aliases = 0, chunks = 0;
    u64 dead = 0;
    std::vector<u32> named(state_.records);
    for (u32 id = 1; id < state_.records; ++id) {
        const SetRecord& record = records_[id];
        if (record.count) {
            SetView set = view(id);
            ++canonical;
            chunks += 1u << Pool::order_of(record.count);
            u32 hash = 0;
            for (u32 i = 0; i < set.count; ++i) hash += hash_of(set.holders[i]);
            if (hash != record.hash) return "a set's hash is wrong";
            if (std::adjacent_find(set.holders, set.holders + set.count, std::greater_equal<u32>()) != set.holders + set.count)
                return "holders do not ascend";
            if (equal_to(hash, set) != id) return "a set is not the one in its bucket";
            if (record.refs == 0 && record.aliases == 0) return "an unused set was not freed";
        } else if (record.alias_of) {
            ++aliases;
            ++named[record.alias_of];
            if (records_[record.alias_of].count == 0) return "an alias does not name a canonical set";
            if (record.refs == 0) return "an unused alias was not freed";
        } else {
            dead += record.refs;
        }
    }
    for (u32 id = 1; id < state_.records; ++id) {
        if (named[id] != records_[id].aliases) return "aliases are miscounted";
    }
    if (canonical != state_.canonical || aliases != state_.aliases) return "sets are miscounted";
    if (dead != state_.dead_blocks) return "dead blocks are miscounted";
    if (chunks != pool_.live_chunks()) return "words leaked";
    return nullptr;
}

}  // namespace kvdir
