// XXH3-64 (seed 0), one-shot and in pieces. The instruction set is chosen at run time; every choice gives the same value.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvdir {

uint64_t hash64(const void* data, size_t bytes);

// The checksum of a payload that arrives in pieces, each hashed while it is still in the cache. Reusable after `reset`.
class PieceHash {
  public:
    PieceHash();
    ~PieceHash();
    PieceHash(const PieceHash&) = delete;
    PieceHash& operator=(const PieceHash&) = delete;
    void reset();
    void update(const void* data, size_t bytes);
    uint64_t value() const;

  private:
    void* state_;
};

namespace detail {
struct HashFunctions {
    uint64_t (*one_shot)(const void*, size_t);
    void* (*create)();
    void (*destroy)(void*);
    void (*reset)(void*);
    void (*update)(void*, const void*, size_t);
    uint64_t (*value)(const void*);
};
extern const HashFunctions baseline;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KVDIR_HASH_VARIANTS 1
extern const HashFunctions avx2;
#endif
}  // namespace detail
}  // namespace kvdir
