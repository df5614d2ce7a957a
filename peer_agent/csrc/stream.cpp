#include "stream.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "clock.hpp"

namespace kvdir {
namespace {

constexpr size_t kPartsMax = 1024;  // IOV_MAX of Linux

class PlainStream final : public Stream {
  public:
    using Stream::Stream;

    Io handshake() override { return Io::MOVED; }

    Moved readv(const iovec* parts, size_t count) override {
        return call(Io::WANT_READ, parts, count, [this](msghdr* message) { return recvmsg(fd(), message, 0); });
    }

    Moved writev(const iovec* parts, size_t count) override {
        return call(Io::WANT_WRITE, parts, count, [this](msghdr* message) { return sendmsg(fd(), message, MSG_NOSIGNAL); });
    }

    std::string reason() const override { return error_ == 0 ? "closed by the peer" : error_text(error_); }

  private:
    template <typename Move>
    Moved call(Io blocked, const iovec* parts, size_t count, Move move) {
        msghdr message{};
        message.msg_iov = const_cast<iovec*>(parts);
        message.msg_iovlen = std::min(count, kPartsMax);
        while (true) {
            const ssize_t moved = move(&message);
            if (moved > 0) return {Io::MOVED, static_cast<size_t>(moved)};
            if (moved < 0 && errno == EINTR) continue;
            if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return {blocked, 0};
            if (moved < 0) error_ = errno;
            return {Io::CLOSED, 0};
        }
    }

    int error_ = 0;
};

}  // namespace

std::unique_ptr<Stream> plain_stream(Fd fd) { return std::make_unique<PlainStream>(std::move(fd)); }

Io write_list(Stream& stream, IoList& list) {
    while (!list.done()) {
        const Moved moved = stream.writev(list.parts(), list.count());
        if (moved.io != Io::MOVED) return moved.io;
        list.advance(moved.bytes);
    }
    return Io::MOVED;
}

Need need_of(Io io) { return io == Io::WANT_READ ? Need::READ : io == Io::WANT_WRITE ? Need::WRITE : Need::NOTHING; }

bool wait_for(int fd, Need need, uint64_t deadline_ns) {
    switch (need) {
        case Need::NOTHING:
        case Need::TURN: return !expired(deadline_ns);
        case Need::READ: return wait_for(fd, short{POLLIN}, deadline_ns);
        case Need::WRITE: return wait_for(fd, short{POLLOUT}, deadline_ns);
        case Need::READ_OR_WRITE: return wait_for(fd, short{POLLIN | POLLOUT}, deadline_ns);
    }
    return false;
}

}  // namespace kvdir
