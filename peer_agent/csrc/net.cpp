#include "net.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "clock.hpp"

namespace kvdir {
namespace {

struct Address {
    sockaddr_storage storage{};
    socklen_t bytes = 0;
};

Address numeric_address(const std::string& host, uint16_t port) {
    addrinfo hints{};
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (rc != 0) throw std::runtime_error("'" + host + "' is not a numeric address: " + gai_strerror(rc));
    Address address;
    std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
    address.bytes = found->ai_addrlen;
    freeaddrinfo(found);
    return address;
}

Fd new_socket(const Address& address) {
    Fd fd(socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd) throw std::runtime_error("cannot create a socket: " + error_text(errno));
    return fd;
}

}  // namespace

std::string endpoint(const std::string& host, uint16_t port) { return host + " port " + std::to_string(port); }

void Fd::reset() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
}

// Buffer sizes stay with the kernel's own tuning: it follows the path's bandwidth and delay, fixed ones do not.
void tune(int fd) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

Fd begin_connect(const std::string& host, uint16_t port) {
    const Address address = numeric_address(host, port);
    Fd fd = new_socket(address);
    tune(fd.get());
    const int rc = ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.bytes);
    if (rc != 0 && errno != EINPROGRESS)
        throw std::runtime_error("cannot connect to " + endpoint(host, port) + ": " + error_text(errno));
    return fd;
}

int connect_error(int fd) {
    int error = 0;
    socklen_t bytes = sizeof error;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
    return error;
}

Fd listen_on(const std::string& host, uint16_t port, uint16_t* bound_port) {
    Address address = numeric_address(host, port);
    Fd fd = new_socket(address);
    const int on = 1;
    setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    auto* raw = reinterpret_cast<sockaddr*>(&address.storage);
    if (::bind(fd.get(), raw, address.bytes) != 0 || ::listen(fd.get(), 128) != 0)
        throw std::runtime_error("cannot listen on " + endpoint(host, port) + ": " + error_text(errno) +
                                 "; choose another port, or 0 for any free one");
    getsockname(fd.get(), raw, &address.bytes);
    const bool v6 = address.storage.ss_family == AF_INET6;
    *bound_port = ntohs(v6 ? reinterpret_cast<sockaddr_in6*>(raw)->sin6_port : reinterpret_cast<sockaddr_in*>(raw)->sin_port);
    return fd;
}

bool wait_for(int fd, short events, uint64_t deadline_ns) {
    while (true) {
        timespec left{};
        if (deadline_ns != 0) {
            const uint64_t now = now_ns();
            if (now >= deadline_ns) return false;
            left.tv_sec = static_cast<time_t>((deadline_ns - now) / 1000000000ULL);
            left.tv_nsec = static_cast<long>((deadline_ns - now) % 1000000000ULL);
        }
        pollfd waiting{fd, events, 0};
        const int rc = ppoll(&waiting, 1, deadline_ns == 0 ? nullptr : &left, nullptr);
        if (rc > 0 || (rc < 0 && errno != EINTR)) return true;  // an error shows itself in the call that follows
    }
}

void IoList::clear() {
    parts_.clear();
    at_ = 0;
}

void IoList::add(const void* data, size_t bytes) {
    if (bytes != 0) parts_.push_back({const_cast<void*>(data), bytes});
}

void IoList::advance(size_t bytes) {
    while (bytes != 0) {
        iovec& part = parts_[at_];
        const size_t taken = bytes < part.iov_len ? bytes : part.iov_len;
        part.iov_base = static_cast<char*>(part.iov_base) + taken;
        part.iov_len -= taken;
        bytes -= taken;
        if (part.iov_len == 0) ++at_;
    }
}

std::string error_text(int error) {
    char text[128] = "";
    const char* found = strerror_r(error, text, sizeof text);  // GNU variant: may not use `text`
    return found;
}

}  // namespace kvdir
