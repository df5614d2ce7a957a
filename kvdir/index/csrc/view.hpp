// A region as another process maps it: read-only, and trusted with nothing.
//
// Rules: everything that may change is read by `peek`, once, and what it says is checked against what is mapped before it is
// used; so neither a torn state nor a hostile file makes a reader leave the mapping or loop without end. A reader never
// writes to the region and waits for nobody for longer than its patience.
// The file's size must not shrink while it is mapped (SIGBUS): region_file.hpp keeps to that, and `open` refuses files that
// others than their owner and root may write to.
#pragma once

#include <algorithm>
#include <atomic>
#include <string>

#include "index.hpp"
#include "roster.hpp"

namespace kvdir {

#ifdef KVDIR_SECTION_HOOK  // tests change what was read
inline void (*peek_hook)(const void* place) = nullptr;
inline void peeked(const void* place) {
    if (peek_hook) peek_hook(place);
}
#else
inline void peeked(const void*) {}
#endif

// One read of memory that another process may be writing.
template <class T>
T peek(const T* place) {
    T value = __atomic_load_n(place, __ATOMIC_RELAXED);
    peeked(place);
    return value;
}

// How long one call may spin while the writer is at work, in pauses of about 40 ns: a section takes some 10 us, a batch some
// sections. A writer that was stopped in the middle costs this once: see RegionView::stuck.
class Patience {
public:
    bool wait(u32 pauses) {
        if (left_ < pauses) return false;
        left_ -= pauses;
        for (; pauses; --pauses) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#else
            __asm__ volatile("isb" ::: "memory");  // `yield` takes no time
#endif
        }
        return true;
    }

private:
    u32 left_ = 4096;
};

// The parts of the header that lookups use, copied at one moment and checked against the mapping.
struct Shape {
    u64 capacity, old_capacity, old_last_key, total;
    u64 records, words, places, nodes;  // how many there are
};

class RegionView {
public:
    explicit RegionView(const std::string& path);  // throws RegionError
    ~RegionView();
    RegionView(const RegionView&) = delete;
    RegionView& operator=(const RegionView&) = delete;

    template <class T>
    const T* at(Segment segment) const {
        return reinterpret_cast<const T*>(base_ + extents_[static_cast<u32>(segment)].offset);
    }

    u64 seed() const { return seed_; }
    u64 generation() const { return generation_; }
    u64 writer_pid() const { return writer_pid_; }
    // Replaced, closed, or without a name: open the path again.
    bool stale() const;

    u64 sequence() const { return __atomic_load_n(&header()->region.sequence, __ATOMIC_ACQUIRE); }
    // Whether nothing was written since `sequence` was seen.
    bool unchanged(u64 sequence) const {
        __atomic_thread_fence(__ATOMIC_ACQUIRE);  // what was read before stays before
        return peek(&header()->region.sequence) == sequence;
    }
    // A section in which a reader has run out of patience before; nobody waits for it again.
    bool stuck(u64 sequence) const { return stuck_.load(std::memory_order_relaxed) == sequence; }
    void found_stuck(u64 sequence) const { stuck_.store(sequence, std::memory_order_relaxed); }
    bool shape(Shape& out) const;  // false: it cannot be true, so it is torn or damaged

    // Copies a sheet of a segment; `offset` from its start, at most `room` bytes of data. Returns its version; 0 when there is
    // none, or when it could not be read in time.
    u32 sheet(Segment segment, u64 offset, u64 room, std::string& out) const;
    // The record of the node, and its version; 0 when the slot is nobody's or another one's by now.
    u32 node(u32 id, std::string& out) const;

    std::vector<u32> nodes() const;  // node_id of each that is known
    Stats stats() const;

private:
    const IndexHeader* header() const { return reinterpret_cast<const IndexHeader*>(base_); }
    u64 committed(Segment segment) const;
    u64 node_slots() const { return std::min<u64>(committed(Segment::nodes) / sizeof(NodeEntry), kNodeLimit); }

    int fd_ = -1;
    const std::byte* base_ = nullptr;
    u64 mapped_bytes_ = 0;
    Extent extents_[kSegments];  // offsets and reservations never change; committed bytes are read anew
    u64 seed_ = 0, generation_ = 0, writer_pid_ = 0;
    mutable std::atomic<u64> stuck_{0};  // sequences of sections are odd
};

// What a lookup in a region answers. Sets hold node_index << 8 | tier, ascending, of visible holders of visible nodes.
struct RegionAnswer {
    std::vector<u32> runs;  // (start, count, set) triples
    SetList sets;
    std::vector<u32> nodes;  // node_id of each node index
    u64 hits = 0;
    bool torn = false;  // some blocks are misses only because the writer was in the way
};

RegionAnswer region_lookup(const RegionView& view, const Fingerprints& blocks, u64 scope, bool prefix);

}  // namespace kvdir
