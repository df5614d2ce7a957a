#include "chain.hpp"

#include <cstring>
#include <vector>

#define XXH_INLINE_ALL
#include "xxhash.h"

#include "sha256.hpp"

namespace kvdir::hashing {

namespace {

// Longest encoding of a token: pickle's LONG1 of a number of 2^31 or more; and what a message has beside tokens and extra keys.
constexpr u64 kTokenBytes = 7;
constexpr u64 kFixedBytes = 80;

template <class T>
u8* put(u8* at, T value) {  // little endian, as this machine is (checked in the build)
    std::memcpy(at, &value, sizeof value);
    return at + sizeof value;
}

template <class T>
u8* put_big(u8* at, T value) {
    for (u64 byte = 0; byte < sizeof value; ++byte) at[byte] = static_cast<u8>(value >> 8 * (sizeof value - 1 - byte));
    return at + sizeof value;
}

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "token messages are little endian");

u64 big(const u8* at) {
    u64 value = 0;
    for (int byte = 0; byte < 8; ++byte) value = value << 8 | at[byte];
    return value;
}

// RFC 8949, 3: a head of major type `major` and the shortest argument, as canonical CBOR wants it.
u8* put_head(u8* at, u8 major, u64 value) {
    const u8 type = static_cast<u8>(major << 5);
    if (value < 24) {
        *at = static_cast<u8>(type | value);
        return at + 1;
    }
    if (value < 0x100) {
        *at = type | 24;
        return put_big(at + 1, static_cast<u8>(value));
    }
    if (value < 0x10000) {
        *at = type | 25;
        return put_big(at + 1, static_cast<std::uint16_t>(value));
    }
    if (value < u64{1} << 32) {
        *at = type | 26;
        return put_big(at + 1, static_cast<u32>(value));
    }
    *at = type | 27;
    return put_big(at + 1, value);
}

// Token ids of one prompt have all lengths in turn, which no branch predictor guesses: both encoders below write the longest form
// and step on by the right length, found by comparing. The buffer has room for it (kTokenBytes).

u8* put_cbor_tokens(u8* at, const u32* tokens, u64 count) {
    at = put_head(at, 4, count);
    for (u64 i = 0; i < count; ++i) {
        const u32 token = tokens[i];
        const u32 form = (token > 23) + (token > 0xff) + (token > 0xffff);
        constexpr u8 heads[] = {0, 24, 25, 26};
        constexpr u8 shifts[] = {0, 24, 16, 0};
        constexpr u8 bytes[] = {1, 2, 3, 5};
        *at = static_cast<u8>(form ? heads[form] : token);
        put(at + 1, __builtin_bswap32(token << shifts[form]));
        at += bytes[form];
    }
    return at;
}

// What Python's pickle, protocol 5, makes of a tuple of ints, memoized.
u8* put_pickle_tokens(u8* at, const u32* tokens, u64 count) {
    if (count > 3) *at++ = '(';
    for (u64 i = 0; i < count; ++i) {
        const u32 token = tokens[i];
        if (token > 0x7fffffff) {  // a signed number of five bytes, and no token of any model
            *at++ = 0x8a;
            *at++ = 5;
            at = put(at, token);
            *at++ = 0;
            continue;
        }
        const u32 form = (token > 0xff) + (token > 0xffff);
        *at = "KMJ"[form];
        put(at + 1, token);
        at += "\2\3\5"[form];
    }
    *at++ = count > 3 ? 't' : static_cast<u8>(0x84 + count);
    *at++ = 0x94;
    return at;
}

struct Bytes {
    const u8* data;
    u64 bytes;
};

struct Sha256 {
    static constexpr u32 width = kSha256Bytes;
    static void hash(const u8* data, u64 bytes, u8* out) { sha256(data, bytes, out); }
};

struct Xxh3 {
    static constexpr u32 width = 16;
    static void hash(const u8* data, u64 bytes, u8* out) { xxh3_128(data, bytes, out); }
};

struct Fnv {
    static constexpr u32 width = 8;
    static void hash(const u8* data, u64 bytes, u8* out) { put_big(out, fnv1a_64(data, bytes)); }
};

// (parent, tokens, extra): PROTO 5, one FRAME, SHORT_BINBYTES parent MEMOIZE, the tokens, and the extra keys up to STOP.
struct Pickle {
    static constexpr u8 nothing[] = {'N', 0x87, 0x94, '.'};
    static u8* write(u8* at, const u8* parent, u32 width, const u32* tokens, u64 count) {
        *at++ = 0x80;
        *at++ = 5;
        *at++ = 0x95;
        at += 8;  // length of the frame, known at the end
        *at++ = 'C';
        *at++ = static_cast<u8>(width);
        std::memcpy(at, parent, width);
        at += width;
        *at++ = 0x94;
        return put_pickle_tokens(at, tokens, count);
    }
    static bool finish(u8* begin, u64 bytes) {
        const u64 frame = bytes - 11;
        put(begin + 3, frame);
        return frame < kPickleFrame;
    }
};

// [parent as bytes, tokens, extra]
struct Cbor {
    static constexpr u8 nothing[] = {0xf6};
    static u8* write(u8* at, const u8* parent, u32 width, const u32* tokens, u64 count) {
        *at++ = 0x83;
        at = put_head(at, 2, width);
        std::memcpy(at, parent, width);
        return put_cbor_tokens(at + width, tokens, count);
    }
    static bool finish(u8*, u64) { return true; }
};

// [parent as a number, tokens, extra]
struct CborNumber {
    static constexpr u8 nothing[] = {0xf6};
    static u8* write(u8* at, const u8* parent, u32, const u32* tokens, u64 count) {
        *at++ = 0x83;
        return put_cbor_tokens(put_head(at, 0, big(parent)), tokens, count);
    }
    static bool finish(u8*, u64) { return true; }
};

// parent, which the first block may be without, and tokens as u32
struct Raw {
    static constexpr Bytes none{nullptr, 0};
    static u8* write(u8* at, const u8* parent, u32 width, const u32* tokens, u64 count) {
        if (parent) {
            std::memcpy(at, parent, width);
            at += width;
        }
        std::memcpy(at, tokens, count * sizeof(u32));
        return at + count * sizeof(u32);
    }
    static bool finish(u8*, u64) { return true; }
};

template <class Message>
Bytes nothing() {
    return {Message::nothing, sizeof Message::nothing};
}
template <>
Bytes nothing<Raw>() {
    return Raw::none;
}

template <class Message, class Hash>
Outcome run(const Blocks& blocks, u8* out) {
    std::vector<u8> message;
    const u8* parent = blocks.root;
    u64 extra_start = 0;
    for (u64 block = 0; block < blocks.count; ++block) {
        Bytes extra = nothing<Message>();
        if (blocks.extras) {
            extra = {blocks.extras + extra_start, blocks.extra_ends[block] - extra_start};
            extra_start = blocks.extra_ends[block];
        }
        const u64 most = kFixedBytes + kTokenBytes * blocks.block_tokens + extra.bytes;
        if (message.size() < most) message.resize(most);
        u8* end = Message::write(message.data(), parent, Hash::width, blocks.tokens + block * blocks.block_tokens, blocks.block_tokens);
        if (extra.bytes) std::memcpy(end, extra.data, extra.bytes);
        const u64 bytes = static_cast<u64>(end - message.data()) + extra.bytes;
        if (!Message::finish(message.data(), bytes)) return Outcome::too_long;
        Hash::hash(message.data(), bytes, out);
        parent = out;
        out += Hash::width;
    }
    return Outcome::done;
}

// A hash of the tokens alone, then one of the hash before and that.
Outcome run_seeded(const Blocks& blocks, u8* out) {
    bool first = !blocks.root;
    u64 parent = first ? 0 : big(blocks.root);
    for (u64 block = 0; block < blocks.count; ++block) {
        const auto* tokens = reinterpret_cast<const u8*>(blocks.tokens + block * blocks.block_tokens);
        const u64 local = xxh3_64(tokens, blocks.block_tokens * sizeof(u32), blocks.seed);
        const u64 both[2] = {parent, local};
        parent = first ? local : xxh3_64(reinterpret_cast<const u8*>(both), sizeof both, blocks.seed);
        first = false;
        out = put_big(out, parent);
    }
    return Outcome::done;
}

}  // namespace

u32 width_of(Chain chain) {
    switch (chain) {
        case Chain::sha256_pickle:
        case Chain::sha256_cbor:
        case Chain::sha256_raw: return Sha256::width;
        case Chain::xxh3_pickle:
        case Chain::xxh3_cbor: return Xxh3::width;
        case Chain::xxh3_seeded:
        case Chain::fnv_cbor: break;
    }
    return Fnv::width;
}

Outcome hash_blocks(Chain chain, const Blocks& blocks, u8* out) {
    switch (chain) {
        case Chain::sha256_pickle: return run<Pickle, Sha256>(blocks, out);
        case Chain::sha256_cbor: return run<Cbor, Sha256>(blocks, out);
        case Chain::xxh3_pickle: return run<Pickle, Xxh3>(blocks, out);
        case Chain::xxh3_cbor: return run<Cbor, Xxh3>(blocks, out);
        case Chain::sha256_raw: return run<Raw, Sha256>(blocks, out);
        case Chain::xxh3_seeded: return run_seeded(blocks, out);
        case Chain::fnv_cbor: break;
    }
    return run<CborNumber, Fnv>(blocks, out);
}

void xxh3_128(const u8* data, u64 bytes, u8* out) {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, bytes));
    std::memcpy(out, canonical.digest, sizeof canonical.digest);
}

u64 xxh3_64(const u8* data, u64 bytes, u64 seed) { return XXH3_64bits_withSeed(data, bytes, seed); }

u64 fnv1a_64(const u8* data, u64 bytes) {
    u64 hash = 0xcbf29ce484222325;
    for (u64 i = 0; i < bytes; ++i) hash = (hash ^ data[i]) * 0x100000001b3;
    return hash;
}

}  // namespace kvdir::hashing
