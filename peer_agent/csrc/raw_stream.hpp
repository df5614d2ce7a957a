// A plain TCP byte stream, as fast as the machine moves one: what `bench read` compares the tcp plane with. No frames, no
// checks, one contiguous buffer on either side.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvdir {

// Both work on a connected socket and throw std::runtime_error on a lost connection or a passed deadline.
void stream_send(int fd, const uint8_t* data, size_t bytes, uint64_t deadline_ns);
void stream_receive(int fd, uint8_t* into, size_t bytes, uint64_t deadline_ns);

}  // namespace kvdir
