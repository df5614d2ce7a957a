#include "device.hpp"

#include <cstring>

namespace kvdir {
namespace {

Status verify_block(const Source& source, const Record& record, const Identity& who, bool check) {
    if (record.state != 1 || !in_range(record.offset, record.length, source.bytes)) return ABSENT;
    const auto* slot = reinterpret_cast<const SlotHeader*>(source.base + record.offset);
    const Status found = verify_header(snapshot(slot), record, who);
    const bool right = found != OK || !check || hash64(source.base + record.offset + kHeaderBytes, record.length) == record.checksum;
    if (generation_after_copy(slot) != record.generation) return found == OK ? TORN : STALE;
    return right ? found : CORRUPT;
}

}  // namespace

void payload_checksums(const Region& region, const uint64_t* offsets, size_t count, uint64_t length, uint64_t* checksums) {
    for (size_t i = 0; i < count; ++i) region.require(offsets[i], length);
    for (size_t i = 0; i < count; ++i) checksums[i] = hash64(region.payload(offsets[i]), length);
}

void reserved_payloads(const Region& region, const uint64_t* offsets, size_t count, uint64_t length, uint64_t* addresses) {
    require_slots(region, offsets, count, length);
    for (size_t i = 0; i < count; ++i) {
        if (load_generation(region.slot(offsets[i])) % 2 == 0)
            throw std::invalid_argument("slot at offset " + std::to_string(offsets[i]) + " is not reserved; begin_write first");
        addresses[i] = reinterpret_cast<uint64_t>(region.payload(offsets[i]));
    }
}

void verify_blocks(const Source& source, const Record* records, const Blocks& blocks, bool check, uint8_t* statuses) {
    for (size_t i = 0; i < blocks.count; ++i) statuses[i] = verify_block(source, records[i], blocks[i], check);
}

CopyBegun begin_copies(CopyFunction function, const uint64_t* destinations, const uint64_t* sources, const uint64_t* lengths,
                       size_t count, void* stream) {
    for (size_t i = 0; i < count; ++i)
        if (const int code = function(destinations[i], sources[i], lengths[i], stream); code != 0) return {code, i};
    return {0, count};
}

void copy_spans(const uint64_t* destinations, const uint64_t* sources, const uint64_t* lengths, size_t count) {
    for (size_t i = 0; i < count; ++i)
        std::memcpy(reinterpret_cast<void*>(destinations[i]), reinterpret_cast<const void*>(sources[i]), lengths[i]);
}

}  // namespace kvdir
