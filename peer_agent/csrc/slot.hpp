// What one slot and one arena look like to native code, and the rule that makes a reader's copy trustworthy.
//
//   0     4      8            16          24      28            32            64           96         128
//   +-----+------+------------+-----------+-------+-------------+-------------+------------+----------+---------
//   |magic|width |generation  |checksum   |length |state group  |fingerprint  |namespace   |reserved  | payload
//   |"KVSL|u32   |u64, atomic |u64 xxh3-64|u32    |u32          |32 B, 0-pad  |digest 32 B |32 B zero | ...
//   +-----+------+------------+-----------+-------+-------------+-------------+------------+----------+---------
//
// The same numbers stand in peer_agent/memory/layout.py; tests/contract/test_layout.py compares them.
//
// Invariants
// - Only the owner (or an engine holding a reservation of the owner) writes a slot; any number of readers in other
//   processes copy from it at any time, without locks.
// - generation never goes back. Odd: free or being written, nobody may believe it. Even: committed.
// - It becomes odd before the first byte of header or payload may change, even only after the last byte was written.
//
// Interleavings (a sequence lock; Boehm, "Can seqlocks get along with programming language memory models?", MSPC 2012)
//
//   writer                                            reader
//   W1 generation = odd          (relaxed)            R1 g1 = generation      (acquire)   odd or not the expected: no
//   W2 fence(release)                                 R2 copy header, payload
//   W3 header, payload = ...                          R3 fence(acquire)
//   W4 generation = even         (release)            R4 g2 = generation      (relaxed)   g2 != g1: torn, discard
//
//   - R2 sees a byte of W3   => W2/R3 order W1 before R4, so g2 is odd or newer: discarded.
//   - R1 sees W4's value     => release/acquire makes every byte of W3 visible to R2.
//   - Engines write in another process between the owner's W1 and W4; the messages that carry the reservation and the
//     commit order their stores, being kernel calls.
//   The byte copies in R2 race with W3 on purpose. What they read is discarded by R4; nothing is decided on it before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvdir {

constexpr uint32_t kSlotMagic = 0x4C53564B;              // "KVSL"
constexpr uint64_t kArenaMagic = 0x414E45524144564BULL;  // "KVDARENA"
constexpr uint32_t kLayoutVersion = 1;
constexpr size_t kSuperblockBytes = 4096;
constexpr size_t kHeaderBytes = 128;
constexpr size_t kAlignBytes = 128;
constexpr size_t kDigestBytes = 32;
constexpr uint32_t kMaxClasses = 63;

struct SlotHeader {
    uint32_t magic;
    uint32_t width;
    uint64_t generation;  // through load_generation/store_* only, except in private copies
    uint64_t checksum;
    uint32_t length;
    uint32_t state_group;
    uint8_t fingerprint[32];
    uint8_t namespace_digest[kDigestBytes];
    uint8_t reserved[32];
};
static_assert(sizeof(SlotHeader) == kHeaderBytes && offsetof(SlotHeader, generation) == 8);
static_assert(offsetof(SlotHeader, fingerprint) == 32 && offsetof(SlotHeader, namespace_digest) == 64);

struct SizeClass {
    uint8_t namespace_digest[kDigestBytes];
    uint64_t block_bytes, stride, first, slots;
};
static_assert(sizeof(SizeClass) == 64);

struct Superblock {
    uint64_t magic;
    uint32_t version, header_bytes;
    uint8_t arena_id[16];
    uint64_t epoch, arena_bytes;
    uint32_t classes, owner_pid;
    uint64_t reserved;
    SizeClass size_class[kMaxClasses];
};
static_assert(sizeof(Superblock) == kSuperblockBytes && offsetof(Superblock, size_class) == 64);

// One LockResponse.blocks record (proto/peer_agent/v1/peer.proto).
struct Record {
    uint64_t offset, generation, checksum;
    uint32_t length, state;  // state: 0 absent, 1 present
};
static_assert(sizeof(Record) == 32);

// peer_agent/transport/base.py ReadStatus.
enum Status : uint8_t { OK = 0, ABSENT = 1, STALE = 2, TORN = 3, CORRUPT = 4, LATE = 5, PEER_LOST = 6 };

// Who a reader believes to be reading: one namespace and one fingerprint of `width` bytes.
struct Identity {
    const uint8_t* namespace_digest;
    const uint8_t* fingerprint;
    uint32_t width;
};

inline uint64_t load_generation(const SlotHeader* slot) { return __atomic_load_n(&slot->generation, __ATOMIC_ACQUIRE); }

// R3 and R4: the generation after a copy, ordered behind every load of the copy.
inline uint64_t generation_after_copy(const SlotHeader* slot) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&slot->generation, __ATOMIC_RELAXED);
}

// W1 and W2. Always advances, also from odd to odd, so that each reservation has a generation of its own.
inline uint64_t make_odd(SlotHeader* slot) {
    const uint64_t now = __atomic_load_n(&slot->generation, __ATOMIC_RELAXED);
    const uint64_t odd = now % 2 == 0 ? now + 1 : now + 2;
    __atomic_store_n(&slot->generation, odd, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    return odd;
}

// W4.
inline uint64_t make_even(SlotHeader* slot) {
    const uint64_t even = __atomic_load_n(&slot->generation, __ATOMIC_RELAXED) + 1;
    __atomic_store_n(&slot->generation, even, __ATOMIC_RELEASE);
    return even;
}

// A private copy of a slot's header that belongs to `generation` field's value as loaded first (R1).
inline SlotHeader snapshot(const SlotHeader* slot) {
    SlotHeader copy;
    const uint64_t before = load_generation(slot);
    std::memcpy(&copy, slot, sizeof copy);
    copy.generation = before;
    return copy;
}

// Does a header, as found before the copy, name the block that `record` promised and `who` asked for?
inline Status verify_header(const SlotHeader& header, const Record& record, const Identity& who) {
    if (record.generation % 2 != 0 || header.generation != record.generation) return STALE;
    if (header.magic != kSlotMagic) return CORRUPT;
    if (header.width != who.width || std::memcmp(header.fingerprint, who.fingerprint, who.width) != 0) return STALE;
    if (std::memcmp(header.namespace_digest, who.namespace_digest, kDigestBytes) != 0) return STALE;
    if (header.length != record.length || header.checksum != record.checksum) return CORRUPT;
    return OK;
}

// Can `length` payload bytes of a slot at `offset` lie in a region of `bytes`? For offsets that a peer named.
inline bool in_range(uint64_t offset, uint64_t length, uint64_t bytes) {
    return offset % kAlignBytes == 0 && offset >= kSuperblockBytes && offset <= bytes && bytes - offset >= kHeaderBytes &&
           bytes - offset - kHeaderBytes >= length;
}

// A mapped arena of ours: base address plus its size classes, copied and validated once so that a superblock that
// changes under us cannot move a range check. The owner adds classes behind the others (add_class), so they are read after
// their number. Throws std::invalid_argument.
class Region {
  public:
    Region() = default;
    Region(const void* base, size_t bytes) : base_(static_cast<uint8_t*>(const_cast<void*>(base))), bytes_(bytes) {
        if (bytes < kSuperblockBytes || reinterpret_cast<uintptr_t>(base) % alignof(SlotHeader) != 0)
            throw std::invalid_argument("region is not an arena: shorter than a superblock, or misaligned");
        Superblock block;
        const uint32_t classes = __atomic_load_n(&reinterpret_cast<const Superblock*>(base)->classes, __ATOMIC_ACQUIRE);
        std::memcpy(&block, base, sizeof block);
        block.classes = classes;
        if (block.magic != kArenaMagic || block.version != kLayoutVersion || block.header_bytes != kHeaderBytes)
            throw std::invalid_argument("region is not an arena of layout version 1; map it with peer_agent.memory.arena");
        if (block.classes > kMaxClasses || block.arena_bytes > bytes || block.arena_bytes < kSuperblockBytes)
            throw std::invalid_argument("arena superblock is damaged: impossible number of classes or size");
        for (uint32_t i = 0; i < block.classes; ++i) add(block.size_class[i], block.arena_bytes);
    }

    size_t bytes() const { return bytes_; }
    uint8_t* base() const { return base_; }
    const std::vector<SizeClass>& classes() const { return classes_; }

    // The class whose slot begins exactly at `offset`, or null.
    const SizeClass* class_at(uint64_t offset) const {
        for (const SizeClass& c : classes_) {
            if (offset < c.first || (offset - c.first) / c.stride >= c.slots) continue;
            return (offset - c.first) % c.stride == 0 ? &c : nullptr;
        }
        return nullptr;
    }

    SlotHeader* slot(uint64_t offset) const { return reinterpret_cast<SlotHeader*>(base_ + offset); }
    uint8_t* payload(uint64_t offset) const { return base_ + offset + kHeaderBytes; }

    // Throws unless a slot begins at `offset` and holds `length` payload bytes.
    void require(uint64_t offset, uint64_t length) const {
        const SizeClass* c = class_at(offset);
        if (c == nullptr) throw std::invalid_argument("no slot begins at offset " + std::to_string(offset) + " of this arena");
        if (length > c->block_bytes)
            throw std::invalid_argument(std::to_string(length) + " bytes do not fit the slot at offset " + std::to_string(offset) +
                                        ", which holds " + std::to_string(c->block_bytes));
    }

    // Do the slots of `c` lie inside an arena of so many bytes?
    static bool fits(const SizeClass& c, uint64_t arena_bytes) {
        const bool shape = c.stride >= kHeaderBytes && c.stride % kAlignBytes == 0 && c.first % kAlignBytes == 0 &&
                           c.first >= kSuperblockBytes && c.block_bytes <= c.stride - kHeaderBytes;
        return shape && c.first <= arena_bytes && c.slots <= (arena_bytes - c.first) / c.stride;
    }

  private:
    void add(const SizeClass& c, uint64_t arena_bytes) {
        if (!fits(c, arena_bytes)) throw std::invalid_argument("arena superblock is damaged: a size class leaves the arena");
        classes_.push_back(c);
    }

    uint8_t* base_ = nullptr;
    size_t bytes_ = 0;
    std::vector<SizeClass> classes_;
};

}  // namespace kvdir
