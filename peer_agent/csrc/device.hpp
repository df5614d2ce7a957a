// What copies between an arena and a device need of native code: blocks that are checked where they lie, and many
// asynchronous copies begun by one call. No Python and no CUDA in here: the driver's function comes in as an address.
#pragma once

#include <cstddef>
#include <cstdint>

#include "copy.hpp"

namespace kvdir {

// XXH3-64 of `length` payload bytes of each slot of ours. Offsets are checked as in copy.hpp.
void payload_checksums(const Region& region, const uint64_t* offsets, size_t count, uint64_t length, uint64_t* checksums);

// Addresses of the payloads of slots of ours that hold `length` bytes and are reserved, for a device to write to. Offsets are
// checked as in copy.hpp; none comes twice.
void reserved_payloads(const Region& region, const uint64_t* offsets, size_t count, uint64_t length, uint64_t* addresses);

// As read_blocks without the copy: is what the records name there now, with the right bytes if `check`? A block that is OK
// before and after somebody else read it (a device's copy engine, say) did not change meanwhile.
void verify_blocks(const Source& source, const Record* records, const Blocks& blocks, bool check, uint8_t* statuses);

// The shape that cuMemcpyHtoDAsync_v2 and cuMemcpyDtoHAsync_v2 share on 64-bit machines: destination, source, bytes, stream.
using CopyFunction = int (*)(uint64_t, uint64_t, size_t, void*);

struct CopyBegun {
    int code;      // 0, or what the function answered for copy `begun`
    size_t begun;  // copies queued before that
};

// Queues the copies one after the other; stops at the first that is refused.
CopyBegun begin_copies(CopyFunction function, const uint64_t* destinations, const uint64_t* sources, const uint64_t* lengths,
                       size_t count, void* stream);

// Copies host memory to host memory, span by span; the caller answers for the addresses.
void copy_spans(const uint64_t* destinations, const uint64_t* sources, const uint64_t* lengths, size_t count);

}  // namespace kvdir
