// The bytes of one connection, whatever lies between them and the network: nothing here, TLS where it is configured.
//
// Rules
// - Nothing blocks. A call that cannot go on says which way the descriptor must become ready first; it may be the other way
//   than that of the call (a TLS read may have to write).
// - A stream may hold bytes that it has taken from the descriptor and not given out yet. So a reader reads until
//   WANT_READ or WANT_WRITE before it waits; a descriptor that is not readable proves nothing.
// - Once CLOSED, always CLOSED; `reason` says why.
// - After a write that could not go on, the next one begins with the same bytes: TLS may have encrypted them already.
// - A write has taken a private copy of every byte that it counts (kernel or TLS engine): the caller's memory may change.
// - One thread at a time. The exception is ::shutdown of `fd` from anywhere, which makes the next call CLOSED.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "net.hpp"

namespace kvdir {

enum class Io : uint8_t { MOVED, WANT_READ, WANT_WRITE, CLOSED };

struct Moved {
    Io io;
    size_t bytes;  // at least 1 when MOVED, else 0
};

class Stream {
  public:
    explicit Stream(Fd fd) : fd_(std::move(fd)) {}
    virtual ~Stream() = default;
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    int fd() const { return fd_.get(); }
    // Until it is MOVED nothing may be read or written.
    virtual Io handshake() = 0;
    // `count` is at least 1 and no part is empty. More parts than one call takes are left for the next.
    virtual Moved readv(const iovec* parts, size_t count) = 0;
    virtual Moved writev(const iovec* parts, size_t count) = 0;
    // Moving bytes costs more than copying them (decryption): nothing for the event loop's thread.
    virtual bool computes() const { return false; }
    // Why it is CLOSED, for people.
    virtual std::string reason() const = 0;

  protected:
    Fd fd_;
};

// Makes the stream of a connected, non-blocking socket. std::runtime_error when it cannot.
using MakeStream = std::function<std::unique_ptr<Stream>(Fd)>;

std::unique_ptr<Stream> plain_stream(Fd fd);

// Writes as much of `list` as goes without waiting; MOVED when it is done.
Io write_list(Stream& stream, IoList& list);

// What somebody who never blocks needs before going on.
enum class Need : uint8_t {
    NOTHING,       // is done
    TURN,          // could go on at once, but lets others go first
    READ,          // the descriptor must become readable
    WRITE,         // ... writable
    READ_OR_WRITE  // ... either
};

Need need_of(Io io);
// Waits for it; false when the deadline passed first.
bool wait_for(int fd, Need need, uint64_t deadline_ns);

}  // namespace kvdir
