// SHA-256 (FIPS 180-4) of one short message at a time, without the set-up cost of a crypto library's context: a block's message has
// one to a few compressions. Uses the CPU's SHA instructions where there are some.
#pragma once

#include <cstdint>

namespace kvdir::hashing {

constexpr std::uint32_t kSha256Bytes = 32;

// out: 32 bytes.
void sha256(const std::uint8_t* data, std::uint64_t bytes, std::uint8_t* out);

// Whether sha256() uses SHA instructions here.
bool sha256_is_accelerated();

// The same by portable code, whatever the CPU can do (tests).
void sha256_portable(const std::uint8_t* data, std::uint64_t bytes, std::uint8_t* out);

}  // namespace kvdir::hashing
