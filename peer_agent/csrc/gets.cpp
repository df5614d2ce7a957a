#include "gets.hpp"

#include "hash.hpp"

namespace kvdir {

Gets plan_gets(const Region& region, const Record* records, const uint64_t* destinations, size_t count, uint64_t source_bytes) {
    const std::vector<uint8_t*> to = destinations_in(region, destinations, records, count);
    Gets gets;
    gets.statuses.resize(count, kPending);
    for (size_t i = 0; i < count; ++i) {
        const Record& record = records[i];
        if (record.state != 1 || !in_range(record.offset, record.length, source_bytes)) {
            gets.statuses[i] = ABSENT;
        } else if (to[i] == nullptr) {
            gets.statuses[i] = CORRUPT;
        } else {
            gets.slots.push_back(record.offset);
            gets.remote.push_back(record.offset + kHeaderBytes);
            gets.local.push_back(reinterpret_cast<uint64_t>(to[i]));
            gets.lengths.push_back(record.length);
        }
    }
    return gets;
}

void verify_gets(const Region& region, const Record* records, const Blocks& blocks, const uint64_t* destinations,
                 const SlotHeader* headers, uint8_t* statuses) {
    for (size_t i = 0; i < blocks.count; ++i) {
        if (statuses[i] != kPending) continue;
        statuses[i] = verify_header(*headers++, records[i], blocks[i]);
        if (statuses[i] == OK && hash64(region.payload(destinations[i]), records[i].length) != records[i].checksum)
            statuses[i] = CORRUPT;
    }
}

}  // namespace kvdir
