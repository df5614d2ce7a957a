// The few socket helpers that both sides of the tcp plane share. Every wait has a deadline (clock.hpp).
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace kvdir {

// Owns a file descriptor.
class Fd {
  public:
    Fd() = default;
    explicit Fd(int fd) : fd_(fd) {}
    Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Fd& operator=(Fd&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Fd() { reset(); }
    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }
    void reset();

  private:
    int fd_ = -1;
};

// Both resolve numeric addresses only ("127.0.0.1", "::1"), since name lookups know no deadline; std::runtime_error with
// the reason otherwise. Sockets are non-blocking, close-on-exec, without Nagle's delay.
// begin_connect does not wait: the socket becomes writable when the attempt has ended, and then connect_error says how.
Fd begin_connect(const std::string& host, uint16_t port);
int connect_error(int fd);
Fd listen_on(const std::string& host, uint16_t port, uint16_t* bound_port);
void tune(int fd);

// Waits for `events`; false when the deadline passed first.
bool wait_for(int fd, short events, uint64_t deadline_ns);

// A list of buffers that is sent or filled from the front.
class IoList {
  public:
    void clear();
    void add(const void* data, size_t bytes);
    bool done() const { return at_ == parts_.size(); }
    iovec* parts() { return parts_.data() + at_; }
    size_t count() const { return parts_.size() - at_; }
    void advance(size_t bytes);

  private:
    std::vector<iovec> parts_;
    size_t at_ = 0;
};

std::string error_text(int error);
std::string endpoint(const std::string& host, uint16_t port);  // for messages

}  // namespace kvdir
