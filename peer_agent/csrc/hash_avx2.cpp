// XXH3 for machines with AVX2, compiled with it whatever the rest is compiled for; hash.cpp decides at run time.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2")
#include <immintrin.h>
#define XXH_VECTOR 2  // XXH_AVX2
#define KVDIR_HASH_TABLE avx2
#include "hash_variant.hpp"
#endif
