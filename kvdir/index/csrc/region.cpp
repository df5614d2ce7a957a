#include "region.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace kvdir {

namespace {

u64 round_up(u64 value, u64 unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

Region::Region(const u64 (&reserve_bytes)[kSegments]) : page_bytes_(static_cast<u64>(sysconf(_SC_PAGESIZE))) {
    constexpr int kHalvings = 10;
    Extent extents[kSegments];
    void* mapped = MAP_FAILED;
    for (int halving = 0; mapped == MAP_FAILED && halving <= kHalvings; ++halving) {
        u64 offset = 0;
        for (u32 i = 0; i < kSegments; ++i) {
            u64 bytes = i == 0 ? reserve_bytes[i] : reserve_bytes[i] >> halving;
            extents[i] = {offset, round_up(bytes, kHugePage), 0};
            offset += extents[i].reserved_bytes;
        }
        mapped_bytes_ = offset + kHugePage;  // room to align the base
        mapped = mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    if (mapped == MAP_FAILED) throw std::bad_alloc();

    // Keep only the aligned part, so that offsets that are multiples of a huge page are addresses that are, too.
    auto start = reinterpret_cast<u64>(mapped);
    u64 skip = round_up(start, kHugePage) - start;
    if (skip) munmap(mapped, skip);
    if (skip < kHugePage) munmap(reinterpret_cast<void*>(start + mapped_bytes_ - (kHugePage - skip)), kHugePage - skip);
    mapped_bytes_ -= kHugePage;
    base_ = reinterpret_cast<std::byte*>(start + skip);

    u64 header_bytes = round_up(sizeof(RegionHeader), page_bytes_);
    if (mprotect(base_, header_bytes, PROT_READ | PROT_WRITE) != 0) {
        munmap(base_, mapped_bytes_);
        throw std::bad_alloc();
    }
    auto* head = header();
    head->magic = kMagic;
    head->version = 1;
    head->segments = kSegments;
    for (u32 i = 0; i < kSegments; ++i) head->extents[i] = extents[i];
    head->extents[0].committed_bytes = header_bytes;
    const Extent& slots = extent(Segment::slots);
    madvise(base_ + slots.offset, slots.reserved_bytes, MADV_HUGEPAGE);  // advice only: refusal costs speed, nothing else
}

Region::~Region() { munmap(base_, mapped_bytes_); }

void Region::commit(Segment segment, u64 bytes) {
    Extent& extent = header()->extents[static_cast<u32>(segment)];
    if (bytes <= extent.committed_bytes) return;
    bytes = round_up(bytes, segment == Segment::slots ? granule_bytes(bytes) : page_bytes_);
    if (bytes > extent.reserved_bytes) throw std::bad_alloc();
    std::byte* from = base_ + extent.offset + extent.committed_bytes;
    if (mprotect(from, bytes - extent.committed_bytes, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    extent.committed_bytes = bytes;
}

}  // namespace kvdir
