// Frames of the tcp plane, little endian, version 2 (1 had no capabilities). The wire names slots, never addresses.
//
//   reader                                             owner
//     | Hello ------------------------------------------> |
//     | <------------------------------------------ Hello |   wrong magic: closed. Other version: answered, then closed
//     |                                                   |
//     | Request, count * SlotRef -----------------------> |   several may be under way; answered in order
//     | <---------- Group, count status bytes, padded     |   G0
//     | <---------- (SlotHeader, payload) per OK status   |
//     | <---------- Trailer per OK status                 |
//     | <---------- Group ...                             |   G1, until all `count` positions are answered
//
//   A group is a run of blocks that travels as one piece. Where it ends depends on the asked lengths alone (group_end), so
//   both sides know it beforehand and the reader can receive payloads of a whole group straight into their slots.
//
// Invariants
// - Header and payload of a slot are sent as they lie there, between two looks at its generation: the owner's when the group
//   begins (it must be the asked one), and the trailer's after the last byte of the group was copied. What is copied in between
//   is what the sequence lock of slot.hpp protects, header included. A stream that says that bytes have moved has copied them
//   (stream.hpp): sendmsg into socket buffers, TLS when it encrypts them, which is earlier. Zero-copy sending would need the
//   kernel's word that the pages were sent before the trailer is read.
// - Under TLS all frames are inside of it, hellos first. Who speaks TLS to a plane without, or the other way round, is
//   answered in the other's language (a hello, a fatal alert), so that both ends can say what is wrong.
// - Slots are refused one by one (ABSENT, STALE) without ending the connection. A frame that cannot come from an honest
//   reader (magic, version, zero or more than kMaxRequestBlocks slots) ends it and is counted.
// - A request shows the capability that came with the lock (peer_agent/core/capability.py, docs/adr/0024). One that is not exactly
//   that of a live grant serves nothing: its blocks are ABSENT, or STALE when it is of another epoch. Which it was, only the
//   owner's counters say. Revocation and expiry are looked at again when a group begins: what is on its way after a revoke is
//   one group at most.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvdir::wire {

constexpr uint32_t kHelloMagic = 0x5444564B;    // "KVDT"
constexpr uint32_t kRequestMagic = 0x5152564B;  // "KVRQ"
constexpr uint32_t kGroupMagic = 0x5247564B;    // "KVGR"
constexpr uint32_t kVersion = 2;
constexpr uint32_t kMaxRequestBlocks = 4096;
constexpr uint32_t kGroupBlocks = 64;
constexpr uint64_t kGroupBytes = 1 << 20;

struct Hello {
    uint32_t magic, version;
    uint64_t epoch;       // owner: its own; reader: 0
    uint32_t max_blocks;  // owner: kMaxRequestBlocks; reader: 0
    uint32_t zero[3];
};
static_assert(sizeof(Hello) == 32);

// As peer_agent/core/capability.py packs it. The reader hands on what it was given and looks at nothing in it.
struct Capability {
    uint8_t version;  // kCapabilityVersion
    uint8_t zero[7];
    uint64_t lock, epoch;
    uint64_t expires_ns;  // of the owner's CLOCK_MONOTONIC
    uint8_t tag[32];
};
static_assert(sizeof(Capability) == 64);
constexpr uint8_t kCapabilityVersion = 1;

struct Request {
    uint32_t magic, count;
    uint32_t tag;  // repeated in each Group of the answer
    uint32_t zero;
    Capability capability;
};
static_assert(sizeof(Request) == 80);

struct SlotRef {
    uint64_t offset, generation;
    uint32_t length, zero;
};
static_assert(sizeof(SlotRef) == 24);

struct Group {
    uint32_t magic, tag;
    uint32_t first, count;  // positions in the request; `count` status bytes follow, padded to padded_statuses(count)
};
static_assert(sizeof(Group) == 16);

struct Trailer {
    uint64_t generation_after;
    uint32_t position, zero;
};
static_assert(sizeof(Trailer) == 16);

// Whether the first bytes of a connection (at least 2) begin a TLS record: an alert or a handshake message.
inline bool looks_like_tls(const uint8_t* first) { return (first[0] == 21 || first[0] == 22) && first[1] == 3; }

constexpr size_t padded_statuses(size_t count) { return (count + 15) / 16 * 16; }

// End (exclusive) of the group that begins at `first`. `length_at(i)` gives the asked length of position i.
template <typename LengthAt>
uint32_t group_end(uint32_t first, uint32_t count, LengthAt length_at) {
    uint64_t bytes = 0;
    uint32_t end = first;
    while (end < count && end - first < kGroupBlocks && (end == first || bytes + length_at(end) <= kGroupBytes)) {
        bytes += length_at(end);
        ++end;
    }
    return end;
}

}  // namespace kvdir::wire
