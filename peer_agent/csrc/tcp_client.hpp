// Reader's side of the tcp plane: one connection, one read at a time (tcp_reading.hpp has the read itself).
//
// Rules
// - Nothing here blocks but the two calls that say so. Connecting, TLS and the hellos go on step by step (`greet`), and so
//   does a read, in whatever thread is free; a silent peer costs a descriptor and no thread.
// - A read that ends early (deadline, broken peer, abort, close) closes the connection: the kernel holds nothing that could
//   still arrive, so nothing writes to the region after the read has ended.
// - `close` may come from any thread; the descriptor itself is closed only when no read uses it any more.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "copy.hpp"
#include "stream.hpp"
#include "wire.hpp"

namespace kvdir {

class TcpReading;

struct ReadJob {
    wire::Capability capability;  // as the owner gave it
    uint64_t epoch;
    const Record* records;
    Blocks blocks;
    uint8_t* const* destinations;  // as destinations_in returns them
    bool check;                    // compare payload checksums
    uint64_t deadline_ns;
};

class TcpClient {
  public:
    // Begins to connect. std::runtime_error when that is refused at once; `greet` goes on.
    TcpClient(const std::string& host, uint16_t port, MakeStream make = plain_stream);
    // Connects, waiting in here. std::runtime_error: with the reason, also when the deadline passes.
    TcpClient(const std::string& host, uint16_t port, uint64_t deadline_ns, MakeStream make = plain_stream);

    // Connect, handshake, hellos: as far as it goes without waiting. NOTHING: reads may begin. One thread at a time.
    // std::runtime_error: cannot connect, no kvdir data plane, another version; the client is of no use then.
    Need greet();
    // What `greet` was waiting for, as the reason of a deadline that passed.
    std::string late_reason() const;

    // Waits in here, also for other reads of this connection.
    void read(const ReadJob& job, uint8_t* statuses);
    // A read that has not begun; null when another one has the connection. `job` and what it points to, and `statuses`, must
    // live as long as it does. Destroying one that has begun and is not done breaks the connection: its answer is on the way.
    std::unique_ptr<TcpReading> try_read(const ReadJob& job, uint8_t* statuses);

    bool broken() const { return broken_.load(std::memory_order_acquire); }
    void close();
    uint64_t epoch() const { return epoch_; }
    int fd() const { return fd_; }
    bool computes() const { return computes_; }  // as Stream says

  private:
    friend class TcpReading;
    enum class Stage : uint8_t { CONNECT, HANDSHAKE, HELLO, READY };

    void say_hello();
    Need hear_hello();
    void take_hello();
    void give_up();   // by who has the connection: nothing more may arrive on it
    void end_turn();

    const std::string where_;
    const MakeStream make_;
    Stage stage_ = Stage::CONNECT;
    Fd socket_;  // until the handshake begins; then the stream has it
    int fd_ = -1;
    bool computes_ = false;
    std::unique_ptr<Stream> stream_;
    wire::Hello hello_{};  // the part of the peer's hello that has arrived
    size_t hello_bytes_ = 0;
    IoList outgoing_;
    wire::Hello ours_{};
    uint64_t epoch_ = 0;

    std::mutex mutex_;  // guards busy_, and the life of stream_ where no read has it
    std::condition_variable turn_;
    bool busy_ = false;  // a read has stream_
    std::atomic<bool> broken_{false};
};

}  // namespace kvdir
