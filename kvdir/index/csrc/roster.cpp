#include "roster.hpp"

#include <cstring>

namespace kvdir {

namespace {

void write_sheet(Sheet& sheet, const void* data, u32 bytes) {
    u32 version = sheet.version;
    __atomic_store_n(&sheet.version, version + 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    sheet.bytes = bytes;
    if (bytes) std::memcpy(&sheet + 1, data, bytes);
    version += version + 2 == 0 ? 4 : 2;  // 0 means that nothing was ever written
    __atomic_store_n(&sheet.version, version, __ATOMIC_RELEASE);
}

}  // namespace

void Roster::create() { region_.commit(Segment::beat, kBeatBytes); }

void Roster::set_holder(u32 number, u32 node, u8 tier, bool visible) {
    Section section(region_);
    region_.commit(Segment::places, (u64{number} + 1) * sizeof(u64));
    region_.at<u64>(Segment::places)[number] = u64{node} << 32 | kPlaceKnown | (visible ? kPlaceVisible : 0) | tier;
}

void Roster::clear_holder(u32 number) {
    if ((u64{number} + 1) * sizeof(u64) > region_.extent(Segment::places).committed_bytes) return;
    Section section(region_);
    region_.at<u64>(Segment::places)[number] = 0;
}

void Roster::set_node(u32 slot, const void* record, u32 bytes) {
    region_.commit(Segment::nodes, (u64{slot} + 1) * sizeof(NodeEntry));
    NodeEntry& entry = region_.at<NodeEntry>(Segment::nodes)[slot];
    write_sheet(entry.sheet, record, bytes);
    if (entry.known) return;
    Section section(region_);
    entry.known = 1;
}

void Roster::clear_node(u32 slot) {
    if ((u64{slot} + 1) * sizeof(NodeEntry) > region_.extent(Segment::nodes).committed_bytes) return;
    NodeEntry& entry = region_.at<NodeEntry>(Segment::nodes)[slot];
    if (!entry.known) return;
    Section section(region_);
    entry.known = 0;
    ++entry.life;
}

bool Roster::set_namespaces(const void* records, u64 bytes) {
    if (bytes + sizeof(Sheet) > region_.extent(Segment::namespaces).reserved_bytes) return false;
    region_.commit(Segment::namespaces, bytes + sizeof(Sheet));
    write_sheet(*region_.at<Sheet>(Segment::namespaces), records, static_cast<u32>(bytes));
    return true;
}

void Roster::beat(const void* record, u32 bytes) { write_sheet(*region_.at<Sheet>(Segment::beat), record, bytes); }

}  // namespace kvdir
