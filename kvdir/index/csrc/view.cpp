#include "view.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvdir {

namespace {

constexpr u64 kHeaderBytes = sizeof(IndexHeader);

[[noreturn]] void refuse(const std::string& path, const std::string& why) { throw RegionError("region " + path + ": " + why); }

// Opened without waiting: what is there may be a pipe.
int open_file(const std::string& path, struct stat& status) {
    int fd = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) {
        std::string hint = errno == ENOENT   ? "there is none; does its writer run?"
                           : errno == EACCES ? "not readable for this user; run as the user of its writer, or give it another mode"
                                             : std::strerror(errno);
        refuse(path, hint);
    }
    bool known = fstat(fd, &status) == 0;
    std::string wrong;
    if (!known || !S_ISREG(status.st_mode)) {
        wrong = "is not a file; give the path of a region";
    } else if (status.st_mode & (S_IWGRP | S_IWOTH)) {
        wrong = "others than its owner may write to it, so it cannot be relied on: chmod go-w, and ask who did that";
    } else if (status.st_uid != geteuid() && status.st_uid != 0 && geteuid() != 0) {
        wrong = "belongs to user " + std::to_string(status.st_uid) + "; use one that this user or root writes";
    }
    if (wrong.empty()) return fd;
    close(fd);
    refuse(path, wrong);
}

std::string text_of(const char* text, std::size_t room) { return std::string(text, strnlen(text, room)); }

// What is wrong with a header that was read from a file of `file_bytes`; empty when nothing is.
std::string fault_of(const IndexHeader& header, u64 file_bytes) {
    const RegionHeader& region = header.region;
    if (region.magic != Region::kMagic) return "is not a region; give the path of one";
    if (region.version != Region::kVersion || region.layout != region_layout()) {
        return "was written by release " + text_of(region.release, sizeof region.release) + ", whose layout is another (version " +
               std::to_string(region.version) + ", here " + std::to_string(Region::kVersion) +
               "): run the same release on both sides, restart its writer or this process";
    }
    if (region.retired) return "was closed by its writer; wait for a new one";
    if (text_of(region.boot_id, sizeof region.boot_id) != boot_id()) return "is from before this machine was started; start its writer";
    u64 end = 0;
    for (const Extent& extent : region.extents) {
        bool in_order = extent.offset == end && extent.offset % 4096 == 0 && extent.reserved_bytes <= file_bytes - end;
        if (!in_order) return "is damaged or was cut short; restart its writer";
        end += extent.reserved_bytes;
    }
    bool usable = region.extents[0].reserved_bytes >= kHeaderBytes && region.generation != 0;
    return usable ? "" : "is damaged; restart its writer";
}

}  // namespace

RegionView::RegionView(const std::string& path) {
    struct stat status{};
    fd_ = open_file(path, status);
    IndexHeader header;
    auto* place = reinterpret_cast<char*>(&header);
    std::string wrong;
    if (pread(fd_, place, kHeaderBytes, 0) != static_cast<ssize_t>(kHeaderBytes)) {
        wrong = "is too short for a region; restart its writer";
    } else {
        wrong = fault_of(header, static_cast<u64>(status.st_size));
    }
    const Extent& last = header.region.extents[kSegments - 1];
    void* mapped = MAP_FAILED;
    if (wrong.empty()) {
        mapped_bytes_ = last.offset + last.reserved_bytes;
        mapped = mmap(nullptr, mapped_bytes_, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd_, 0);
        if (mapped == MAP_FAILED) wrong = std::string("cannot be mapped: ") + std::strerror(errno) + "; is address space limited?";
    }
    if (!wrong.empty()) {
        close(fd_);
        refuse(path, wrong);
    }
    madvise(mapped, mapped_bytes_, MADV_DONTDUMP);  // a core would hold all of it, gaps included, once the file has no name
    base_ = static_cast<const std::byte*>(mapped);
    std::copy(std::begin(header.region.extents), std::end(header.region.extents), extents_);
    seed_ = header.seed;
    generation_ = header.region.generation;
    writer_pid_ = header.region.writer_pid;
}

RegionView::~RegionView() {
    munmap(const_cast<std::byte*>(base_), mapped_bytes_);
    close(fd_);
}

bool RegionView::stale() const {
    if (peek(&header()->region.retired)) return true;
    struct stat status{};
    return fstat(fd_, &status) != 0 || status.st_nlink == 0;
}

u64 RegionView::committed(Segment segment) const {
    auto i = static_cast<u32>(segment);
    return std::min(peek(&header()->region.extents[i].committed_bytes), extents_[i].reserved_bytes);
}

bool RegionView::shape(Shape& out) const {
    const TableState& table = header()->table;
    out = {peek(&table.capacity),
           peek(&table.old_capacity),
           peek(&table.old_last_key),
           peek(&table.total),
           peek(&header()->sets.records),
           committed(Segment::words) / sizeof(u32),
           committed(Segment::places) / sizeof(u64),
           node_slots()};
    u64 slots = committed(Segment::slots) / sizeof(Slot);
    return out.total <= slots && out.total > Table::kGuard && out.capacity <= out.total - Table::kGuard &&
           out.old_capacity <= out.capacity && out.records <= committed(Segment::records) / sizeof(SetRecord);
}

u32 RegionView::sheet(Segment segment, u64 offset, u64 room, std::string& out) const {
    const u64 end = committed(segment);
    if (offset + sizeof(Sheet) > end) return 0;
    room = std::min(room, end - offset - sizeof(Sheet)) / sizeof(u64) * sizeof(u64);
    const Sheet* sheet = reinterpret_cast<const Sheet*>(at<std::byte>(segment) + offset);
    const u64* words = reinterpret_cast<const u64*>(sheet + 1);
    for (Patience patience; ; ) {
        u32 version = __atomic_load_n(&sheet->version, __ATOMIC_ACQUIRE);
        u64 bytes = peek(&sheet->bytes);
        if (version == 0) return 0;
        if (version % 2 == 0 && bytes <= room) {
            out.resize((bytes + 7) / 8 * 8);
            for (u64 i = 0; i < out.size() / 8; ++i) {
                u64 word = peek(words + i);
                std::memcpy(&out[i * 8], &word, sizeof word);
            }
            __atomic_thread_fence(__ATOMIC_ACQUIRE);
            if (peek(&sheet->version) == version) {
                out.resize(bytes);
                return version;
            }
        }
        if (!patience.wait(64)) return 0;
    }
}

// The record is that of the node if the slot was its both before and after.
u32 RegionView::node(u32 id, std::string& out) const {
    if (slot_of(id) >= node_slots()) return 0;
    const u64 offset = u64{slot_of(id)} * sizeof(NodeEntry);
    const NodeEntry& entry = at<NodeEntry>(Segment::nodes)[slot_of(id)];
    auto still = [&] { return peek(&entry.known) && node_id(slot_of(id), peek(&entry.life)) == id; };
    if (!still()) return 0;
    u32 version = sheet(Segment::nodes, offset + offsetof(NodeEntry, sheet), sizeof entry.record, out);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return still() ? version : 0;
}

std::vector<u32> RegionView::nodes() const {
    std::vector<u32> ids;
    const NodeEntry* entries = at<NodeEntry>(Segment::nodes);
    const u64 count = node_slots();
    for (u32 slot = 0; slot < count; ++slot) {
        if (peek(&entries[slot].known)) ids.push_back(node_id(slot, peek(&entries[slot].life)));
    }
    return ids;
}

// Figures of one moment are wanted here, not of one consistent state.
Stats RegionView::stats() const {
    const IndexHeader& now = *header();
    u64 used = peek(&now.table.used), dead = peek(&now.sets.dead_blocks), bytes = 0;
    for (u32 i = 0; i < kSegments; ++i) bytes += committed(static_cast<Segment>(i));
    return {used - std::min(used, dead),       peek(&now.table.capacity), bytes,
            peek(&now.sets.canonical),         peek(&now.sets.holders),   peek(&now.table.old_capacity) != 0};
}

}  // namespace kvdir
