#define KVDIR_HASH_TABLE baseline
#include "hash_variant.hpp"

#include <new>

namespace kvdir {
namespace {
const detail::HashFunctions& choose() {
#ifdef KVDIR_HASH_VARIANTS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) return detail::avx2;
#endif
    return detail::baseline;
}

const detail::HashFunctions& functions() {
    static const detail::HashFunctions& chosen = choose();
    return chosen;
}
}  // namespace

uint64_t hash64(const void* data, size_t bytes) { return functions().one_shot(data, bytes); }

PieceHash::PieceHash() : state_(functions().create()) {
    if (state_ == nullptr) throw std::bad_alloc();
    reset();
}
PieceHash::~PieceHash() { functions().destroy(state_); }
void PieceHash::reset() { functions().reset(state_); }
void PieceHash::update(const void* data, size_t bytes) { functions().update(state_, data, bytes); }
uint64_t PieceHash::value() const { return functions().value(state_); }

}  // namespace kvdir
