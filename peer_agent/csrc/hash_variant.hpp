// Body of one hash_*.cpp: the including file chose XXH_VECTOR and the table's name, KVDIR_HASH_TABLE.
// No include guard: it is meant to be compiled once per instruction set.
#define XXH_INLINE_ALL
#include "hash.hpp"
#include "xxhash.h"

namespace kvdir::detail {
namespace {
uint64_t one_shot(const void* data, size_t bytes) { return XXH3_64bits(data, bytes); }
void* create() { return XXH3_createState(); }
void destroy(void* state) { XXH3_freeState(static_cast<XXH3_state_t*>(state)); }
void reset(void* state) { XXH3_64bits_reset(static_cast<XXH3_state_t*>(state)); }
void update(void* state, const void* data, size_t bytes) { XXH3_64bits_update(static_cast<XXH3_state_t*>(state), data, bytes); }
uint64_t value(const void* state) { return XXH3_64bits_digest(static_cast<const XXH3_state_t*>(state)); }
}  // namespace
extern const HashFunctions KVDIR_HASH_TABLE;
const HashFunctions KVDIR_HASH_TABLE = {one_shot, create, destroy, reset, update, value};
}  // namespace kvdir::detail
