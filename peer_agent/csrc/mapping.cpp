#include "mapping.hpp"

#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <thread>
#include <vector>

namespace kvdir {
namespace {

// linux/mman.h and linux/mempolicy.h, which older headers lack.
constexpr int kPopulateWrite = 23, kCollapse = 25;
constexpr int kBindPolicy = 2;
constexpr int kMaxNodes = 1024;
constexpr size_t kThreadBytes = 64 << 20;  // less than this is not worth a thread

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

Mapping::Mapping(int fd, size_t bytes, bool writable) : bytes_(bytes), page_bytes_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    struct statfs found{};
    if (fstatfs(fd, &found) != 0) fail("statfs");
    if (found.f_type == HUGETLBFS_MAGIC) page_bytes_ = static_cast<size_t>(found.f_bsize);
    bytes_ = round_up(bytes, page_bytes_);
    // Room for the mapping at any alignment, then the mapping over the aligned part, then the rest back.
    const size_t unit = std::max(kHugeBytes, page_bytes_);
    void* const room = mmap(nullptr, bytes_ + unit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) fail("mmap");
    auto* const begin = static_cast<uint8_t*>(room);
    auto* const aligned = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(room), unit));
    uint8_t* const end = begin + bytes_ + unit;
    if (mmap(aligned, bytes_, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        const int error = errno;
        munmap(room, bytes_ + unit);
        errno = error;
        fail("mmap");
    }
    data_ = aligned;
    if (aligned != begin) munmap(begin, static_cast<size_t>(aligned - begin));
    uint8_t* const tail = aligned + round_up(bytes_, static_cast<size_t>(sysconf(_SC_PAGESIZE)));
    if (tail < end) munmap(tail, static_cast<size_t>(end - tail));
}

Mapping::~Mapping() { munmap(data_, bytes_); }

void Mapping::bind(int node) {
    if (node < 0 || node >= kMaxNodes) {
        errno = EINVAL;
        fail("mbind");
    }
    constexpr size_t kBits = 8 * sizeof(unsigned long);
    unsigned long nodes[kMaxNodes / kBits] = {};
    nodes[static_cast<size_t>(node) / kBits] = 1UL << (static_cast<size_t>(node) % kBits);
    if (syscall(SYS_mbind, data_, bytes_, kBindPolicy, nodes, kMaxNodes + 1, 0) != 0) fail("mbind");
}

void Mapping::advise_huge(bool wanted) { (void)madvise(data_, bytes_, wanted ? MADV_HUGEPAGE : MADV_NOHUGEPAGE); }

void Mapping::remove(size_t offset) {
    const size_t from = round_up(offset, page_bytes_);
    if (from < bytes_ && madvise(data_ + from, bytes_ - from, MADV_REMOVE) != 0) fail("madvise");
}

void Mapping::prefault(bool huge, unsigned threads) {
    const size_t wanted = std::min<size_t>(std::max(threads, 1U), std::max<size_t>(bytes_ / kThreadBytes, 1));
    const size_t share = round_up(bytes_ / wanted + 1, std::max(kHugeBytes, page_bytes_));
    std::vector<std::thread> workers;
    for (size_t from = share; from < bytes_; from += share) {
        const auto part = [=] { prefault_part(from, std::min(from + share, bytes_), huge); };
        try {
            workers.emplace_back(part);
        } catch (const std::system_error&) {  // no more threads
            part();
        }
    }
    prefault_part(0, std::min(share, bytes_), huge);
    for (std::thread& worker : workers) worker.join();
}

void Mapping::prefault_part(size_t from, size_t to, bool huge) const {
    const bool collapses = huge && page_bytes_ < kHugeBytes;
    const size_t whole = to / kHugeBytes * kHugeBytes;
    // The first huge page that cannot be had ends the attempts: where memory is fragmented, each costs a compaction.
    for (size_t at = from; collapses && at < whole; at += kHugeBytes)
        if (madvise(data_ + at, page_bytes_, kPopulateWrite) != 0 || madvise(data_ + at, kHugeBytes, kCollapse) != 0) break;
    (void)madvise(data_ + from, to - from, kPopulateWrite);
}

}  // namespace kvdir
