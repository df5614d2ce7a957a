// Mixing functions. The pure oracle (kvdir/index/reference.py) repeats them word for word.
#pragma once

#include <cstring>

#include "region.hpp"

namespace kvdir {

constexpr u64 kGolden = 0x9E3779B97F4A7C15;

// Finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection in which every bit depends on every bit.
inline u64 scramble(u64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

inline u64 load_u64(const u8* bytes) {
    u64 value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

// A 64-bit fingerprint becomes a key by a bijection that seed and scope choose (secret offset, secret odd multiplier):
// two blocks of one scope collide only if their first 8 bytes are equal, and nobody without the seed can aim at one
// part of the table. Key 0 means "empty slot", so the one fingerprint that would give 0 shares key 1.
class KeyMix {
public:
    KeyMix(u64 seed, u64 scope)
        : offset_(scramble(scramble(seed + kGolden) ^ scope)), multiplier_(scramble(offset_ + kGolden) | 1) {}

    // What was mixed into `key`; of key 1 the fingerprint that does not give 0.
    u64 inverse(u64 key) const {
        u64 x = key ^ (key >> 31) ^ (key >> 62);
        x *= odd_inverse(multiplier_);
        x = (x ^ (x >> 27) ^ (x >> 54)) * odd_inverse(0xBF58476D1CE4E5B9);
        return (x ^ (x >> 30) ^ (x >> 60)) ^ offset_;
    }

    u64 operator()(u64 fingerprint) const {
        u64 x = fingerprint ^ offset_;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
        x = (x ^ (x >> 27)) * multiplier_;
        x ^= x >> 31;
        return x + (x == 0);
    }

private:
    // Of an odd number modulo 2^64, by Newton's method: each step doubles the bits that are right, of which 3 are at first.
    static u64 odd_inverse(u64 x) {
        u64 inverse = x;
        for (int bits = 3; bits < 64; bits *= 2) inverse *= 2 - x * inverse;
        return inverse;
    }

    u64 offset_;
    u64 multiplier_;
};

// Packed fingerprints, `width` bytes each; the buffer belongs to the caller.
struct Fingerprints {
    const u8* data;
    u64 count;
    u32 width;  // 8, 16 or 32

    const u8* at(u64 position) const { return data + position * width; }
    u64 head(u64 position) const { return load_u64(at(position)); }
};

}  // namespace kvdir
