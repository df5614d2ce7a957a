// Reader's side of the tcp plane: one connection, one read at a time, payloads received straight into our slots.
//
// Rules
// - Everything waits by ppoll against the caller's deadline. A read that ends early (deadline, broken peer, close) shuts
//   the connection: the kernel holds nothing that could still arrive, so nothing writes to the region after read returned.
// - The peer is trusted in nothing: frames are compared with what was asked, payload lengths are ours, every header is
//   verified against record, fingerprint and namespace, and the checksum runs over the bytes as they lie in our slot.
// - `close` may come from any thread; the descriptor itself is closed only when no read uses it any more.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "copy.hpp"
#include "net.hpp"
#include "wire.hpp"

namespace kvdir {

struct ReadJob {
    uint64_t lock, epoch;
    const Record* records;
    Blocks blocks;
    uint8_t* const* destinations;  // as destinations_in returns them
    bool check;                    // compare payload checksums
    uint64_t deadline_ns;
};

class TcpClient {
  public:
    // Throws std::runtime_error: cannot connect, no hello in time, not a kvdir data plane, another version.
    TcpClient(const std::string& host, uint16_t port, uint64_t deadline_ns);

    void read(const ReadJob& job, uint8_t* statuses);
    bool broken() const { return broken_.load(std::memory_order_acquire); }
    void close();
    uint64_t epoch() const { return epoch_; }

  private:
    class Reading;

    Fd fd_;
    uint64_t epoch_ = 0;
    std::timed_mutex reading_;  // one read at a time; the next waits within its own deadline
    std::mutex fd_mutex_;       // guards the life of fd_ between close and read
    std::atomic<bool> broken_{false};
};

}  // namespace kvdir
