#include "raw_stream.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

#include "net.hpp"

namespace kvdir {
namespace {

constexpr size_t kCallBytes = 1 << 20;

// Waits if the last call would have blocked, throws if the stream ended.
void wait_or_throw(int fd, ssize_t moved, short events, uint64_t deadline_ns) {
    if (moved < 0 && errno == EINTR) return;
    if (moved == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) throw std::runtime_error("raw stream: the other end closed");
    if (!wait_for(fd, events, deadline_ns)) throw std::runtime_error("raw stream: not done by the deadline");
}

}  // namespace

void stream_send(int fd, const uint8_t* data, size_t bytes, uint64_t deadline_ns) {
    for (size_t at = 0; at < bytes;) {
        const ssize_t sent = send(fd, data + at, std::min(kCallBytes, bytes - at), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0)
            at += static_cast<size_t>(sent);
        else
            wait_or_throw(fd, sent, POLLOUT, deadline_ns);
    }
}

void stream_receive(int fd, uint8_t* into, size_t bytes, uint64_t deadline_ns) {
    for (size_t at = 0; at < bytes;) {
        const ssize_t got = recv(fd, into + at, std::min(kCallBytes, bytes - at), MSG_DONTWAIT);
        if (got > 0)
            at += static_cast<size_t>(got);
        else
            wait_or_throw(fd, got, POLLIN, deadline_ns);
    }
}

}  // namespace kvdir
