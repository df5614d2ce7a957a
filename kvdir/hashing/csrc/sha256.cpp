#include "sha256.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvdir::hashing {

namespace {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr u64 kBlock = 64;

alignas(16) constexpr u32 kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr u32 kInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

u32 rotated(u32 value, int by) { return value >> by | value << (32 - by); }

u32 big_endian(const u8* at) { return u32{at[0]} << 24 | u32{at[1]} << 16 | u32{at[2]} << 8 | at[3]; }

void put_big_endian(u8* at, u32 value) {
    for (int byte = 0; byte < 4; ++byte) at[byte] = static_cast<u8>(value >> (24 - 8 * byte));
}

void compress_portable(u32* state, const u8* data, u64 blocks) {
    for (; blocks; --blocks, data += kBlock) {
        u32 w[64];
        for (int t = 0; t < 16; ++t) w[t] = big_endian(data + 4 * t);
        for (int t = 16; t < 64; ++t) {
            const u32 a = w[t - 15], b = w[t - 2];
            w[t] = w[t - 16] + (rotated(a, 7) ^ rotated(a, 18) ^ a >> 3) + w[t - 7] + (rotated(b, 17) ^ rotated(b, 19) ^ b >> 10);
        }
        u32 v[8];
        std::memcpy(v, state, sizeof v);
        for (int t = 0; t < 64; ++t) {
            const u32 e = v[4], a = v[0];
            const u32 one = v[7] + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((e & v[5]) ^ (~e & v[6])) + kRound[t] + w[t];
            const u32 two = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
            std::memmove(v + 1, v, 7 * sizeof(u32));
            v[4] += one;
            v[0] = one + two;
        }
        for (int word = 0; word < 8; ++word) state[word] += v[word];
    }
}

#if defined(__x86_64__)

bool has_sha() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & 1u << 29)) return false;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 9) && (c & 1u << 19);  // SSSE3, SSE4.1
}

// The state is held as the instructions want it: (A B E F) and (C D G H), highest word first.
__attribute__((target("sha,sse4.1,ssse3"))) void compress_sha(u32* state, const u8* data, u64 blocks) {
    const __m128i swap = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
    auto* words = reinterpret_cast<__m128i*>(state);
    const __m128i abcd = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xB1);
    const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1B);
    __m128i abef = _mm_alignr_epi8(abcd, efgh, 8);
    __m128i cdgh = _mm_blend_epi16(efgh, abcd, 0xF0);
    for (; blocks; --blocks, data += kBlock) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
        for (int quad = 0; quad < 4; ++quad) {
            w[quad] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + quad), swap);
        }
#pragma GCC unroll 16
        for (int quad = 0; quad < 16; ++quad) {
            __m128i& now = w[quad & 3];
            if (quad >= 4) {
                const __m128i three = w[(quad + 3) & 3];
                const __m128i middle = _mm_alignr_epi8(three, w[(quad + 2) & 3], 4);
                now = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(now, w[(quad + 1) & 3]), middle), three);
            }
            const __m128i sum = _mm_add_epi32(now, _mm_load_si128(reinterpret_cast<const __m128i*>(kRound) + quad));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
    const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
}

#endif

using Compress = void (*)(u32*, const u8*, u64);

Compress chosen() {
#if defined(__x86_64__)
    if (has_sha()) return compress_sha;
#endif
    return compress_portable;
}

const Compress kCompress = chosen();

void digest(Compress compress, const u8* data, u64 bytes, u8* out) {
    u32 state[8];
    std::memcpy(state, kInitial, sizeof state);
    compress(state, data, bytes / kBlock);
    const u64 rest = bytes % kBlock;
    u8 tail[2 * kBlock] = {};
    if (rest) std::memcpy(tail, data + bytes - rest, rest);
    tail[rest] = 0x80;
    const u64 blocks = rest + 9 > kBlock ? 2 : 1;
    put_big_endian(tail + blocks * kBlock - 8, static_cast<u32>(bytes >> 29));
    put_big_endian(tail + blocks * kBlock - 4, static_cast<u32>(bytes << 3));
    compress(state, tail, blocks);
    for (int word = 0; word < 8; ++word) put_big_endian(out + 4 * word, state[word]);
}

}  // namespace

void sha256(const u8* data, u64 bytes, u8* out) { digest(kCompress, data, bytes, out); }

bool sha256_is_accelerated() { return kCompress != compress_portable; }

void sha256_portable(const u8* data, u64 bytes, u8* out) { digest(compress_portable, data, bytes, out); }

}  // namespace kvdir::hashing
