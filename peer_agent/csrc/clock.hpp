// CLOCK_MONOTONIC in nanoseconds: the only clock of the native core. Deadlines are absolute in it; 0 means none.
#pragma once

#include <cstdint>
#include <ctime>

namespace kvdir {

inline uint64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000ULL + static_cast<uint64_t>(t.tv_nsec);
}

inline bool expired(uint64_t deadline_ns) { return deadline_ns != 0 && now_ns() >= deadline_ns; }

}  // namespace kvdir
