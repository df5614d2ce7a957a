// Who the holders of a region are: what turns holder numbers into nodes, for readers without a directory of their own.
//
//   places      u64 per holder number:  | node slot 32 | - 16 | flags 8 | tier 8 |     0 = nobody
//   nodes       NodeEntry per node slot, 1 KiB: known, life, and a sheet with the node's record
//   namespaces  one sheet with all namespaces
//   beat        one sheet of a page: whether the writer still lives, and how far behind it is
//
//   sheet       | version 4 | bytes 4 | data ... |     version odd while it is written, 0 before the first time
//
// Records are opaque here; kvdir/core/roster.py says what stands in them. A sheet has its own version, so a beat or an age
// disturbs no lookup; what decides about an answer (places, and who has a node slot) is written in sections of the region.
// A slot is used again by other nodes, one life after the other; answers name a node by slot and life together (node_id), so what
// they name is never taken for whoever has the slot later.
#pragma once

#include "region.hpp"

namespace kvdir {

constexpr u32 kNodeLimit = u32{1} << 16;
constexpr u64 kNamespaceBytes = u64{64} << 20;
constexpr u64 kBeatBytes = 4096;

struct Sheet {
    u32 version;
    u32 bytes;
    // data follows, in whole words of 8 bytes
};
static_assert(sizeof(Sheet) == 8);

struct NodeEntry {
    u32 known;  // 0: nobody has the slot
    u32 life;   // rises whenever the slot is cleared
    Sheet sheet;
    u8 record[1008];
};
static_assert(sizeof(NodeEntry) == 1024 && offsetof(NodeEntry, record) == offsetof(NodeEntry, sheet) + sizeof(Sheet));

constexpr u32 node_id(u32 slot, u32 life) { return life << 16 | slot; }
constexpr u32 slot_of(u32 node_id) { return node_id & (kNodeLimit - 1); }

constexpr u64 kPlaceVisible = u64{1} << 8, kPlaceKnown = u64{1} << 9;

// The writer's side; a view, cheap to make. All of it may throw std::bad_alloc, and then nothing has changed.
class Roster {
public:
    explicit Roster(Region& region) : region_(region) {}

    void create();  // once

    void set_holder(u32 number, u32 node, u8 tier, bool visible);
    void clear_holder(u32 number);
    void set_node(u32 slot, const void* record, u32 bytes);  // at most sizeof NodeEntry::record
    void clear_node(u32 slot);
    bool set_namespaces(const void* records, u64 bytes);  // false: more than the region has room for
    void beat(const void* record, u32 bytes);             // at most kBeatBytes - sizeof(Sheet)

private:
    Region& region_;
};

}  // namespace kvdir
