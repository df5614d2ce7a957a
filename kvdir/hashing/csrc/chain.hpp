// Block hash chains of other projects, computed as they compute them: per block one message, in which the hash of the block before is,
// and one hash of it. The formats are in docs/hashing.md; the oracles, in tests/unit/test_hashing.py and tests/vllm/test_hashes.py.
#pragma once

#include <cstdint>

namespace kvdir::hashing {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

// Numbers are those of kvdir/hashing/schemes.py.
enum class Chain : u32 { sha256_pickle, sha256_cbor, xxh3_pickle, xxh3_cbor, sha256_raw, xxh3_seeded, fnv_cbor };
constexpr u32 kChains = 7;

// Bytes of one hash.
u32 width_of(Chain chain);

struct Blocks {
    const u32* tokens;        // count * block_tokens of them
    u64 count;
    u64 block_tokens;
    const u8* root;           // parent of the first block, width_of() bytes; null: none, only where a chain begins without
    const u8* extras;         // what follows the tokens of each block, encoded and end to end; null: what stands for "nothing"
    const u64* extra_ends;    // where that of block i ends in `extras`; never falling
    u64 seed;                 // xxh3_seeded only
};

enum class Outcome { done, too_long };

// A pickle is one frame only below this; longer messages are refused (too_long).
constexpr u64 kPickleFrame = 64 * 1024;

// out: count * width_of(chain) bytes. Throws std::bad_alloc.
Outcome hash_blocks(Chain chain, const Blocks& blocks, u8* out);

void xxh3_128(const u8* data, u64 bytes, u8* out);  // 16 bytes, canonical (big endian)
u64 xxh3_64(const u8* data, u64 bytes, u64 seed);
u64 fnv1a_64(const u8* data, u64 bytes);

}  // namespace kvdir::hashing
