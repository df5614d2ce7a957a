// Batch work on slots: reserve, commit, scattered copies in and out, checksums. No Python in here.
//
// Rules
// - Every offset is checked before the first byte changes; a call that throws has changed nothing.
// - Offsets of our own region must be the beginning of a slot (std::invalid_argument otherwise). Offsets that a peer named
//   are checked against the size of its mapping and are a status of that block when wrong, never an exception.
// - Copies run in pieces that stay in the L2 cache, so that hashing a piece costs no second trip to memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "hash.hpp"
#include "slot.hpp"

namespace kvdir {

constexpr size_t kPieceBytes = 64 << 10;

// n packed fingerprints of `width` bytes in one namespace.
struct Blocks {
    size_t count;
    const uint8_t* namespace_digest;
    const uint8_t* fingerprints;
    uint32_t width;

    Identity operator[](size_t i) const { return {namespace_digest, fingerprints + i * width, width}; }
    // Blocks [first, end).
    Blocks part(size_t first, size_t end) const { return {end - first, namespace_digest, fingerprints + first * width, width}; }
};

// Throws std::invalid_argument unless each offset begins a slot of at least `length` bytes and none comes twice.
void require_slots(const Region& region, const uint64_t* offsets, size_t count, uint64_t length);

// Owner: one more class, behind all others, in an arena that readers have mapped. They see either the old number of classes or a
// whole new one. Throws std::invalid_argument when it does not fit. Not for two threads at once.
void add_class(const Region& region, const SizeClass& added);

void begin_write(const Region& region, const uint64_t* offsets, size_t count, uint64_t* generations);
void retire(const Region& region, const uint64_t* offsets, size_t count);

// checksums: null computes them. Throws if a slot is not reserved (generation even).
void commit(const Region& region, const uint64_t* offsets, const Blocks& blocks, uint32_t length, const uint64_t* checksums,
            Record* out);
void read_records(const Region& region, const uint64_t* offsets, size_t count, Record* out);
void read_headers(const Region& region, const uint64_t* offsets, size_t count, SlotHeader* out);

// Copies `length` bytes from each source into a reserved slot; checksums are of what the slot then holds.
void write_blocks(const Region& region, const uint64_t* offsets, const uint64_t* sources, size_t count, uint64_t length,
                  uint64_t* checksums);

// What a verified copy reads from: any mapping of a peer's arena, trusted in nothing.
struct Source {
    const uint8_t* base;
    size_t bytes;
};

// Verified copies of the blocks that `records` name into `destinations` (addresses). Blocks not begun at CLOCK_MONOTONIC
// deadline_ns are LATE, also the one in the middle of which it passes; 0 means no deadline. A present block with a null
// destination is CORRUPT: its record promises more than the destination holds. Once *stop (may be null) is set, blocks not
// begun are PEER_LOST.
void read_blocks(const Source& source, const Record* records, const Blocks& blocks, uint8_t* const* destinations, bool check,
                 uint64_t deadline_ns, const std::atomic<bool>* stop, uint8_t* statuses);

// Payload addresses of reserved slots of ours (checked); null where a record is absent or longer than the slot.
std::vector<uint8_t*> destinations_in(const Region& region, const uint64_t* offsets, const Record* records, size_t count);

// Payload bytes of the present records whose status is OK; of all present ones where statuses is null.
uint64_t payload_bytes(const Record* records, size_t count, const uint8_t* statuses);

// The plain scattered memcpy that `bench read` compares with.
void copy_scattered(const Region& region, const uint64_t* offsets, size_t count, uint64_t length, uint8_t* destination);

}  // namespace kvdir
