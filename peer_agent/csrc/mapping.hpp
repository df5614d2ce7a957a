// A whole file mapped shared: where its huge pages can be mapped as such, on the NUMA node that is wanted, touched before use.
//
// Rules
// - The address is a multiple of kHugeBytes: only then a 2 MiB page of the file can be one page of the mapping. The kernel does
//   that by itself only where the file system is mounted for huge pages.
// - prefault never raises SIGBUS: pages are asked for by madvise, which fails where memory ends. What is missing then is left to
//   the caller's fallocate, which says so.
// - MADV_COLLAPSE (Linux 6.1) makes huge pages of tmpfs also where transparent_hugepage/shmem_enabled says never. It wants one
//   page of each 2 MiB to be there; collapsing one page is faster than populating 512 and collapsing them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvdir {

constexpr size_t kHugeBytes = 2 << 20;

class Mapping {
  public:
    // Throws std::system_error. On hugetlbfs `bytes` is rounded up to its pages, which the file must have.
    Mapping(int fd, size_t bytes, bool writable);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }
    // Of the file's pages: more than the machine's base page on hugetlbfs only.
    size_t page_bytes() const { return page_bytes_; }

    // New pages come from this node only. Before the first one is there. Throws std::system_error.
    void bind(int node);
    // A hint; kernels and file systems without huge pages ignore it.
    void advise_huge(bool wanted);
    // Gives the memory of all whole pages behind `offset` back to the file system; whoever maps them finds zeros. Throws
    // std::system_error where the file system cannot.
    void remove(size_t offset);
    // Allocates, zeroes and maps everything, in `threads` threads; with `huge` as huge pages where they can be had.
    void prefault(bool huge, unsigned threads);

  private:
    void prefault_part(size_t from, size_t to, bool huge) const;

    uint8_t* data_ = nullptr;
    size_t bytes_, page_bytes_;
};

}  // namespace kvdir
