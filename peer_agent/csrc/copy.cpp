#include "copy.hpp"

#include <algorithm>
#include <string>

#include "clock.hpp"

namespace kvdir {
namespace {

void require_distinct(const uint64_t* offsets, size_t count) {
    if (std::adjacent_find(offsets, offsets + count, std::greater_equal<>()) == offsets + count) return;  // ascending
    std::vector<uint64_t> sorted(offsets, offsets + count);
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice != sorted.end()) throw std::invalid_argument("slot at offset " + std::to_string(*twice) + " is named twice");
}

void require_reserved(const Region& region, const uint64_t* offsets, size_t count) {
    for (size_t i = 0; i < count; ++i) __builtin_prefetch(region.slot(offsets[i]));  // their cache misses together
    for (size_t i = 0; i < count; ++i)
        if (load_generation(region.slot(offsets[i])) % 2 == 0)
            throw std::invalid_argument("slot at offset " + std::to_string(offsets[i]) + " is not reserved; begin_write first");
}

bool visible(const SlotHeader& header) { return header.magic == kSlotMagic && header.generation % 2 == 0; }

Record record_of(uint64_t offset, const SlotHeader& header) {
    return {offset, header.generation, header.checksum, header.length, visible(header) ? 1U : 0U};
}

// Everything but the generation, of a slot that is odd.
void fill_header(SlotHeader* slot, const Identity& who, uint32_t length, uint64_t checksum) {
    slot->magic = kSlotMagic;
    slot->width = who.width;
    slot->checksum = checksum;
    slot->length = length;
    slot->state_group = 0;
    std::memset(slot->fingerprint, 0, sizeof slot->fingerprint);
    std::memcpy(slot->fingerprint, who.fingerprint, who.width);
    std::memcpy(slot->namespace_digest, who.namespace_digest, kDigestBytes);
    std::memset(slot->reserved, 0, sizeof slot->reserved);
}

// Copies in pieces and hashes each piece of the copy while it is in the cache. False if the deadline passed meanwhile.
bool copy_pieces(uint8_t* to, const uint8_t* from, uint64_t bytes, PieceHash* hash, uint64_t deadline_ns) {
    for (uint64_t at = 0; at < bytes; at += kPieceBytes) {
        const size_t piece = std::min<uint64_t>(kPieceBytes, bytes - at);
        std::memcpy(to + at, from + at, piece);
        if (hash != nullptr) hash->update(to + at, piece);
        if (at + piece < bytes && expired(deadline_ns)) return false;
    }
    return true;
}

Status read_block(const Source& source, const Record& record, const Identity& who, uint8_t* to, PieceHash* hash,
                  uint64_t deadline_ns) {
    if (record.state != 1 || !in_range(record.offset, record.length, source.bytes)) return ABSENT;
    if (to == nullptr) return CORRUPT;
    const auto* slot = reinterpret_cast<const SlotHeader*>(source.base + record.offset);
    const Status before = verify_header(snapshot(slot), record, who);
    if (before != OK) return generation_after_copy(slot) == record.generation ? before : STALE;
    if (hash != nullptr) hash->reset();
    if (!copy_pieces(to, source.base + record.offset + kHeaderBytes, record.length, hash, deadline_ns)) return LATE;
    if (generation_after_copy(slot) != record.generation) return TORN;
    return hash == nullptr || hash->value() == record.checksum ? OK : CORRUPT;
}

// The next block's header is the one cache miss that a reader can see coming.
void prefetch_header(const Source& source, const Record& record) {
    if (in_range(record.offset, 0, source.bytes)) __builtin_prefetch(source.base + record.offset);
}

}  // namespace

void require_slots(const Region& region, const uint64_t* offsets, size_t count, uint64_t length) {
    for (size_t i = 0; i < count; ++i) region.require(offsets[i], length);
    require_distinct(offsets, count);
}

void add_class(const Region& region, const SizeClass& added) {
    Superblock* block = reinterpret_cast<Superblock*>(region.base());
    const std::vector<SizeClass>& known = region.classes();
    uint64_t end = kSuperblockBytes;
    for (const SizeClass& c : known) end = std::max(end, c.first + c.slots * c.stride);
    if (known.size() >= kMaxClasses) throw std::invalid_argument("an arena has at most " + std::to_string(kMaxClasses) + " classes");
    if (added.slots == 0 || added.first < end || !Region::fits(added, block->arena_bytes))
        throw std::invalid_argument("the class overlaps another or leaves the arena");
    block->size_class[known.size()] = added;
    __atomic_store_n(&block->classes, static_cast<uint32_t>(known.size() + 1), __ATOMIC_RELEASE);
}

void begin_write(const Region& region, const uint64_t* offsets, size_t count, uint64_t* generations) {
    require_slots(region, offsets, count, 0);
    for (size_t i = 0; i < count; ++i) generations[i] = make_odd(region.slot(offsets[i]));
}

void retire(const Region& region, const uint64_t* offsets, size_t count) {
    require_slots(region, offsets, count, 0);
    for (size_t i = 0; i < count; ++i) {
        SlotHeader* slot = region.slot(offsets[i]);
        const uint64_t odd = make_odd(slot);
        SlotHeader empty{};
        empty.generation = odd;
        std::memcpy(static_cast<void*>(slot), &empty, offsetof(SlotHeader, generation));
        std::memcpy(&slot->checksum, &empty.checksum, kHeaderBytes - offsetof(SlotHeader, checksum));
    }
}

void commit(const Region& region, const uint64_t* offsets, const Blocks& blocks, uint32_t length, const uint64_t* checksums,
            Record* out) {
    require_slots(region, offsets, blocks.count, length);
    require_reserved(region, offsets, blocks.count);
    for (size_t i = 0; i < blocks.count; ++i) {
        SlotHeader* slot = region.slot(offsets[i]);
        const uint64_t checksum = checksums != nullptr ? checksums[i] : hash64(region.payload(offsets[i]), length);
        fill_header(slot, blocks[i], length, checksum);
        out[i] = {offsets[i], make_even(slot), checksum, length, 1};
    }
}

void read_records(const Region& region, const uint64_t* offsets, size_t count, Record* out) {
    for (size_t i = 0; i < count; ++i) region.require(offsets[i], 0);
    for (size_t i = 0; i < count; ++i) {
        const SlotHeader* slot = region.slot(offsets[i]);
        out[i] = record_of(offsets[i], snapshot(slot));
        if (generation_after_copy(slot) != out[i].generation) out[i].state = 0;
    }
}

void read_headers(const Region& region, const uint64_t* offsets, size_t count, SlotHeader* out) {
    for (size_t i = 0; i < count; ++i) region.require(offsets[i], 0);
    for (size_t i = 0; i < count; ++i) out[i] = snapshot(region.slot(offsets[i]));
}

void write_blocks(const Region& region, const uint64_t* offsets, const uint64_t* sources, size_t count, uint64_t length,
                  uint64_t* checksums) {
    require_slots(region, offsets, count, length);
    require_reserved(region, offsets, count);
    PieceHash hash;
    for (size_t i = 0; i < count; ++i) {
        hash.reset();
        copy_pieces(region.payload(offsets[i]), reinterpret_cast<const uint8_t*>(sources[i]), length, &hash, 0);
        checksums[i] = hash.value();
    }
}

void read_blocks(const Source& source, const Record* records, const Blocks& blocks, uint8_t* const* destinations, bool check,
                 uint64_t deadline_ns, const std::atomic<bool>* stop, uint8_t* statuses) {
    PieceHash hash;
    for (size_t i = 0; i < blocks.count; ++i) {
        const bool stopped = stop != nullptr && stop->load(std::memory_order_relaxed);
        if (stopped || expired(deadline_ns)) {
            std::memset(statuses + i, stopped ? PEER_LOST : LATE, blocks.count - i);
            return;
        }
        if (i + 1 < blocks.count) prefetch_header(source, records[i + 1]);
        statuses[i] = read_block(source, records[i], blocks[i], destinations[i], check ? &hash : nullptr, deadline_ns);
    }
}

std::vector<uint8_t*> destinations_in(const Region& region, const uint64_t* offsets, const Record* records, size_t count) {
    require_slots(region, offsets, count, 0);
    require_reserved(region, offsets, count);
    std::vector<uint8_t*> addresses(count);
    for (size_t i = 0; i < count; ++i) {
        const bool fits = records[i].length <= region.class_at(offsets[i])->block_bytes;
        addresses[i] = records[i].state == 1 && fits ? region.payload(offsets[i]) : nullptr;
    }
    return addresses;
}

uint64_t payload_bytes(const Record* records, size_t count, const uint8_t* statuses) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; ++i)
        if (records[i].state == 1 && (statuses == nullptr || statuses[i] == OK)) bytes += records[i].length;
    return bytes;
}

void copy_scattered(const Region& region, const uint64_t* offsets, size_t count, uint64_t length, uint8_t* destination) {
    for (size_t i = 0; i < count; ++i) region.require(offsets[i], length);
    for (size_t i = 0; i < count; ++i) std::memcpy(destination + i * length, region.payload(offsets[i]), length);
}

}  // namespace kvdir
