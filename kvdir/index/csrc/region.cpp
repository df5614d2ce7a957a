#include "region.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <new>

#include "region_file.hpp"

namespace kvdir {

namespace {

u64 round_up(u64 value, u64 unit) { return (value + unit - 1) / unit * unit; }

// Allocates, so that a full file system is an error here and not a SIGBUS at the first touch.
bool allocate(int fd, u64 offset, u64 bytes) {
    int error;
    do {
        error = posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(bytes));
    } while (error == EINTR);
    return error == 0;
}

}  // namespace

Region::Region(const u64 (&reserve_bytes)[kSegments]) : page_bytes_(static_cast<u64>(sysconf(_SC_PAGESIZE))) {
    reserve(reserve_bytes);
    const Extent& slots = extent(Segment::slots);
    madvise(base_ + slots.offset, slots.reserved_bytes, MADV_HUGEPAGE);  // advice only: refusal costs speed, nothing else
}

Region::Region(const u64 (&reserve_bytes)[kSegments], const RegionPlace& place)
    : page_bytes_(static_cast<u64>(sysconf(_SC_PAGESIZE))), file_(new RegionFile(place)) {
    reserve(reserve_bytes);
    file_->sign(*header());
    const Extent& slots = extent(Segment::slots);
    madvise(base_ + slots.offset, slots.reserved_bytes, MADV_HUGEPAGE);
}

Region::~Region() { close(); }

void Region::close() noexcept {
    if (closed()) return;
    if (file_ && file_->created_here()) retire();
    munmap(base_, mapped_bytes_);
    base_ = nullptr;
    if (file_) file_->close();
}

void Region::reserve(const u64 (&reserve_bytes)[kSegments]) {
    constexpr int kHalvings = 10;
    Extent extents[kSegments];
    bool mapped = false;
    for (int halving = 0; !mapped && halving <= kHalvings; ++halving) {
        u64 offset = 0;
        for (u32 i = 0; i < kSegments; ++i) {
            u64 bytes = i == 0 ? reserve_bytes[i] : reserve_bytes[i] >> halving;
            extents[i] = {offset, round_up(bytes, kHugePage), 0};
            offset += extents[i].reserved_bytes;
        }
        mapped = map(offset);
    }
    if (!mapped) throw std::bad_alloc();

    u64 header_bytes = round_up(sizeof(RegionHeader), page_bytes_);
    bool there = !file_ || allocate(file_->fd(), 0, header_bytes);
    if (!there || mprotect(base_, header_bytes, PROT_READ | PROT_WRITE) != 0) {
        munmap(base_, mapped_bytes_);
        if (!there) throw RegionError(file_->no_room());
        throw std::bad_alloc();
    }
    auto* head = header();
    head->magic = kMagic;
    head->version = kVersion;
    for (u32 i = 0; i < kSegments; ++i) head->extents[i] = extents[i];
    head->extents[0].committed_bytes = header_bytes;
}

// Keeps only an aligned part, so that offsets that are multiples of a huge page are addresses that are, too.
bool Region::map(u64 bytes) {
    if (file_ && ftruncate(file_->fd(), static_cast<off_t>(bytes)) != 0) return false;  // a limit on file sizes
    void* mapped = mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return false;
    auto start = reinterpret_cast<u64>(mapped);
    u64 skip = round_up(start, kHugePage) - start;
    if (skip) munmap(mapped, skip);
    if (skip < kHugePage) munmap(reinterpret_cast<void*>(start + skip + bytes), kHugePage - skip);
    base_ = reinterpret_cast<std::byte*>(start + skip);
    mapped_bytes_ = bytes;
    if (!file_) return true;
    if (mmap(base_, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file_->fd(), 0) == MAP_FAILED) {
        munmap(base_, bytes);
        return false;
    }
    madvise(base_, bytes, MADV_DONTDUMP);  // see RegionView
    return true;
}

bool Region::make_room(u64 offset, u64 bytes, bool may_pause) noexcept {
    const bool pause = may_pause && header()->sequence & 1;
    if (pause) end_section();
    bool there = (!file_ || allocate(file_->fd(), offset, bytes)) && mprotect(base_ + offset, bytes, PROT_READ | PROT_WRITE) == 0;
    if (pause) begin_section();
    return there;
}

void Region::commit(Segment segment, u64 bytes, bool may_pause) {
    Extent& extent = header()->extents[static_cast<u32>(segment)];
    if (bytes <= extent.committed_bytes) return;
    bytes = round_up(bytes, segment == Segment::slots ? granule_bytes(bytes) : page_bytes_);
    if (bytes > extent.reserved_bytes) throw std::bad_alloc();
    u64 more = bytes - extent.committed_bytes;
    bool charged = segment < Segment::places && !is_sparse(segment);
    if (charged && more > spare_bytes_) throw std::bad_alloc();
    if (!make_room(extent.offset + extent.committed_bytes, more, may_pause)) throw std::bad_alloc();
    extent.committed_bytes = bytes;
    if (charged) charge(more);
}

void Region::charge(u64 bytes) {
    if (spare_bytes_ == ~u64{0}) return;
    if (bytes > spare_bytes_) throw std::bad_alloc();
    spare_bytes_ -= bytes;
}

}  // namespace kvdir
