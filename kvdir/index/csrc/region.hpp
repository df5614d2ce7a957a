// One position-independent range of memory that holds a whole index.
//
//   base
//   +--------+---------+---------+---------+-------+------+---------------------------+
//   | header | holders | records | buckets | words | map  | slots ...                 |   segments, at fixed offsets
//   +--------+---------+---------+---------+-------+------+---------------------------+
//   |##      |#        |###      |#        |####   |#     |########                   |   # committed: readable, writable
//
// Address space is reserved once (PROT_NONE: costs neither memory nor commit charge) and every segment grows in place by
// committing more of it, so growing never copies and never needs a second table. Nothing in the region is a pointer:
// only offsets and ids relative to a segment, so the same bytes can live in a file in shared memory and be mapped
// anywhere. Extents stand in the region itself (RegionHeader), for those who map it.
//
// Invariants: offsets never change; `committed_bytes` only grows; committed bytes that were never written read as zero.
// Not in here: what the segments mean (table, pool, sets), and any locking.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvdir {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using u128 = unsigned __int128;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the region and the sketch are little-endian");

enum class Segment : u32 { header, holders, records, buckets, words, word_map, slots };
constexpr u32 kSegments = 7;

struct Extent {
    u64 offset;           // from the base of the region
    u64 reserved_bytes;   // address space
    u64 committed_bytes;  // usable prefix
};

struct RegionHeader {
    u64 magic;
    u32 version;
    u32 segments;
    Extent extents[kSegments];
};

class Region {
public:
    static constexpr u64 kMagic = 0x584449524944564B;  // "KVDIRIDX", little-endian
    static constexpr u64 kHugePage = u64{2} << 20;
    // From this size on a segment of slots grows by whole huge pages: fewer TLB misses, and nothing half used.
    static constexpr u64 kHugeFrom = u64{4} << 20;

    // Reserves the given bytes per segment; where the system allows less, every segment but the header is halved until
    // it fits. Throws std::bad_alloc when not even a small region can be had.
    explicit Region(const u64 (&reserve_bytes)[kSegments]);
    ~Region();
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    template <class T>
    T* at(Segment segment) const {
        return reinterpret_cast<T*>(base_ + extent(segment).offset);
    }

    // Makes at least `bytes` of the segment usable. Throws std::bad_alloc when the reservation or memory is exhausted,
    // and then nothing has changed.
    void commit(Segment segment, u64 bytes);

    const Extent& extent(Segment segment) const { return header()->extents[static_cast<u32>(segment)]; }

    // Unit in which a segment of slots of this size grows, in bytes.
    u64 granule_bytes(u64 segment_bytes) const { return segment_bytes < kHugeFrom ? page_bytes_ : kHugePage; }

private:
    RegionHeader* header() const { return reinterpret_cast<RegionHeader*>(base_); }

    std::byte* base_ = nullptr;
    u64 mapped_bytes_ = 0;
    u64 page_bytes_ = 0;
};

}  // namespace kvdir
