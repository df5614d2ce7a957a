// Reads of a peer's arena by one-sided gets (ucx, nixl): what to get, and whether what came is the block. No Python in here.
//
//   reader                                               owner's memory
//   1 get payload of every block  ---------------------> slot + 128, record.length bytes
//   2 when all have arrived: get every header ---------> slot, 128 bytes
//   3 verify: header's identity, generation == record.generation, xxh3-64 of the payload == record.checksum
//
// Why one look at the header afterwards is enough (no look before, as in copy.cpp): record.generation was even when the owner
// locked the block. A generation never goes back, and goes odd before the first byte of the slot may change (slot.hpp W1, W2). The
// header was asked for after the last payload byte had arrived. If it still shows record.generation, no write had begun between
// Lock and that moment, so the payload is what was locked. Any other generation: the payload may be anything, and is not used.
//
// A header get is not atomic either: a writer may be halfway through the header when it is read. What then contradicts the record
// under the right generation looks like rot (CORRUPT), so such headers are asked for once more (reads.py) before the
// owner's memory is accused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy.hpp"
#include "slot.hpp"

namespace kvdir {

// Not yet known; no status of the port. `plan_gets` leaves it where a get is due.
constexpr uint8_t kPending = 255;

struct Gets {
    std::vector<uint8_t> statuses;  // one per record: kPending, or final (ABSENT, CORRUPT)
    std::vector<uint64_t> slots;    // of the pending ones: offset of the slot's header in the peer's arena,
    std::vector<uint64_t> remote;   // of its payload there,
    std::vector<uint64_t> local;    // address of the payload in the destination slot,
    std::vector<uint64_t> lengths;  // bytes of payload
};

// Throws std::invalid_argument unless destinations are distinct reserved slots of `region`. No get leaves [0, source_bytes) of the
// peer's arena or its destination slot.
Gets plan_gets(const Region& region, const Record* records, const uint64_t* destinations, size_t count, uint64_t source_bytes);

// headers: of the pending blocks, in order. Replaces every kPending in `statuses`.
void verify_gets(const Region& region, const Record* records, const Blocks& blocks, const uint64_t* destinations,
                 const SlotHeader* headers, uint8_t* statuses);

}  // namespace kvdir
