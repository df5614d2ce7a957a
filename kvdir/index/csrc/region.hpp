// One position-independent range of memory that holds a whole index.
//
//   base
//   +--------+---------+---------+---------+-------+------+-------------+--------+-------+------------+------+
//   | header | holders | records | buckets | words | map  | slots ...   | places | nodes | namespaces | beat |
//   +--------+---------+---------+---------+-------+------+-------------+--------+-------+------------+------+
//   |##      |#        |###      |#        |####   |#     |########     |#       |#      |#           |##    |   # committed
//    segments, at fixed offsets; the last four (roster.hpp) only in a file
//
// Address space is reserved once (PROT_NONE: costs neither memory nor commit charge) and every segment grows in place by
// committing more of it, so growing never copies and never needs a second table. Nothing in the region is a pointer:
// only offsets and ids relative to a segment, so the same bytes can live in a file in shared memory and be mapped
// anywhere (region_file.hpp, view.hpp). Extents stand in the region itself (RegionHeader), for those who map it.
//
// Sections: whoever writes what readers look at does it between `begin_section` and `end_section`, in short pieces, each of
// which leaves everything consistent. The sequence is odd meanwhile, so a reader in another process knows that what it has
// seen belongs together if the sequence was even and the same before and after (a sequence lock: Boehm, "Can seqlocks get
// along with programming language memory models?", MSPC 2012). A reader writes nothing, and nobody waits for it.
//
// Invariants: offsets never change; `committed_bytes` only grows; committed bytes that were never written read as zero; in a
// file, committed bytes are allocated, so neither side ever meets SIGBUS.
// Not in here: what the segments mean (table, pool, sets, roster), and any locking between writers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace kvdir {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using u128 = unsigned __int128;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the region and the sketch are little-endian");

enum class Segment : u32 { header, holders, records, buckets, words, word_map, slots, places, nodes, namespaces, beat };
constexpr u32 kSegments = 11;

struct Extent {
    u64 offset;           // from the base of the region
    u64 reserved_bytes;   // address space
    u64 committed_bytes;  // usable prefix
};

struct RegionHeader {
    // The same in every version, so that any release can tell what it has before it.
    u64 magic;
    u32 version;
    u32 retired;       // 1: replaced or closed; whoever reads it opens the path again
    char release[32];  // that wrote it, zero-terminated
    // From here on as the version says.
    u64 layout;        // kLayout of the writer: sizes of everything in the region
    u64 generation;    // random, never 0
    u64 writer_pid;    // in the writer's own pid namespace
    u64 writer_start;  // clock ticks since boot, as /proc/PID/stat says
    char boot_id[40];  // /proc/sys/kernel/random/boot_id
    Extent extents[kSegments];
    alignas(64) u64 sequence;  // odd while a section is open; a line of its own, because readers poll it
};

class RegionFile;
struct RegionPlace;

class Region {
public:
    static constexpr u64 kMagic = 0x584449524944564B;  // "KVDIRIDX", little-endian
    static constexpr u32 kVersion = 2;
    static constexpr u64 kHugePage = u64{2} << 20;
    // From this size on a segment of slots grows by whole huge pages: fewer TLB misses, and nothing half used.
    static constexpr u64 kHugeFrom = u64{4} << 20;

    // Reserves the given bytes per segment; where the system allows less, every segment but the header is halved until
    // it fits. Throws std::bad_alloc when not even a small region can be had.
    explicit Region(const u64 (&reserve_bytes)[kSegments]);
    // The same in a new file, which nobody sees before `file()->publish()`. Throws RegionError, too.
    Region(const u64 (&reserve_bytes)[kSegments], const RegionPlace& place);
    ~Region();
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    template <class T>
    T* at(Segment segment) const {
        return reinterpret_cast<T*>(base_ + extent(segment).offset);
    }

    // Makes at least `bytes` of the segment usable. Throws std::bad_alloc when the reservation or memory is exhausted,
    // and then nothing has changed. An open section pauses meanwhile, because a large step takes milliseconds: so only where
    // everything is consistent, as it has to be where something may throw.
    void commit(Segment segment, u64 bytes) { commit(segment, bytes, true); }
    // The same in the middle of a change.
    void commit_within_section(Segment segment, u64 bytes) { commit(segment, bytes, false); }

    const Extent& extent(Segment segment) const { return header()->extents[static_cast<u32>(segment)]; }

    // From now on at most `bytes` more are committed or charged, but for the roster; what would be beyond throws
    // std::bad_alloc. Whoever has not asked for a limit has none.
    void set_spare(u64 bytes) { spare_bytes_ = bytes; }
    u64 spare_bytes() const { return spare_bytes_; }
    // Committing more of it costs nothing before it is written to, so whoever writes charges the pages. In a file, all that
    // is committed is there.
    bool is_sparse(Segment segment) const { return segment == Segment::holders && !file_; }
    void charge(u64 bytes);

    // Unit in which a segment of slots of this size grows, in bytes.
    u64 granule_bytes(u64 segment_bytes) const { return segment_bytes < kHugeFrom ? page_bytes_ : kHugePage; }

    void begin_section() noexcept {
        looked_at(true);
        __atomic_store_n(&header()->sequence, header()->sequence + 1, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_RELEASE);  // no write of the section may be seen before the odd number
    }
    void end_section() noexcept {
        __atomic_store_n(&header()->sequence, header()->sequence + 1, __ATOMIC_RELEASE);
        looked_at(false);
    }
    // Between two steps of a long section, where everything is consistent: lets readers see it. Without a section: nothing.
    void turn_section() noexcept {
        if ((header()->sequence & 1) == 0) return;
        end_section();
        begin_section();
    }

#ifdef KVDIR_SECTION_HOOK  // tests look at every state that readers may see
    void (*section_hook)(bool begins) = nullptr;
    void looked_at(bool begins) const {
        if (section_hook) section_hook(begins);
    }
#else
    void looked_at(bool) const {}
#endif

    RegionFile* file() const { return file_.get(); }  // null: anonymous memory
    void retire() noexcept { __atomic_store_n(&header()->retired, 1, __ATOMIC_RELEASE); }
    // Retires, takes the file away and gives the memory and the lock back; nothing but the destructor may follow.
    void close() noexcept;
    bool closed() const { return base_ == nullptr; }

private:
    RegionHeader* header() const { return reinterpret_cast<RegionHeader*>(base_); }
    void reserve(const u64 (&reserve_bytes)[kSegments]);
    bool map(u64 bytes);
    void commit(Segment segment, u64 bytes, bool may_pause);
    bool make_room(u64 offset, u64 bytes, bool may_pause) noexcept;

    std::byte* base_ = nullptr;
    u64 mapped_bytes_ = 0;
    u64 page_bytes_;
    u64 spare_bytes_ = ~u64{0};
    std::unique_ptr<RegionFile> file_;
};

// One section, ended however its scope is left.
class Section {
public:
    explicit Section(Region& region) : region_(region) { region_.begin_section(); }
    ~Section() { region_.end_section(); }
    Section(const Section&) = delete;
    Section& operator=(const Section&) = delete;

private:
    Region& region_;
};

}  // namespace kvdir
