// Reader's side of the tcp plane: one connection, one read at a time, payloads received straight into our slots.
//
// Rules
// - Everything waits by ppoll against the caller's deadline. A read that ends early (deadline, broken peer, close) shuts
//   the connection: the kernel holds nothing that could still arrive, so nothing writes to the region after read returned.
// - The peer is trusted in nothing: frames are compared with what was asked, payload lengths are ours, every header is
//   verified against record, fingerprint and namespace, and the checksum runs over the bytes as they lie in our slot.
// - `close` may come from any thread; the descriptor itself is closed only when no read uses it any more.
// - A read may be begun in one thread (try_begin sends the request and never waits) and finished in another, so that the
//   owner is at work while a mover thread wakes up.
#pragma once

#include <atomic>
#include <condition_variable>
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
    class Reading;  // a read that has begun; defined in tcp_client.cpp
    struct DeleteReading {
        void operator()(Reading* reading) const;
    };
    using ReadingPtr = std::unique_ptr<Reading, DeleteReading>;

    // Throws std::runtime_error: cannot connect, no hello in time, not a kvdir data plane, another version.
    TcpClient(const std::string& host, uint16_t port, uint64_t deadline_ns);

    // `job` and what it points to, and `statuses`, must live until the read is finished.
    void read(const ReadJob& job, uint8_t* statuses);
    // Null when another read has the connection. The reading must go to `finish`; destroying it instead breaks the
    // connection, because its answer is on the way.
    ReadingPtr try_begin(const ReadJob& job, uint8_t* statuses);
    void finish(ReadingPtr reading);

    bool broken() const { return broken_.load(std::memory_order_acquire); }
    void close();
    uint64_t epoch() const { return epoch_; }

  private:
    class Turn;

    void give_up();

    Fd fd_;
    uint64_t epoch_ = 0;
    std::mutex mutex_;  // guards busy_, and the life of fd_ where no read has it
    std::condition_variable turn_;
    bool busy_ = false;  // a read has fd_
    std::atomic<bool> broken_{false};
};

}  // namespace kvdir
