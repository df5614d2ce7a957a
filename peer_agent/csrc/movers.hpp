// A few native threads that run any number of reads, so that neither starting nor ending one waits for Python's lock and a
// peer that says nothing holds no thread.
//
//                    submit                 advance()            NOTHING
//   event loop ------------------> READY ------------> RUNNING ------------> done list, eventfd ---> collect
//                      |             ^ ^      TURN       |                        ^
//                      | READ, WRITE | +-----------------+                        |
//                      |             | descriptor ready  | READ, WRITE            | deadline: end(LATE)
//                      +-----------> WAITING <-----------+ -----------------------+ abort, close: end(PEER_LOST)
//
// All threads wait in one epoll set: sockets one-shot, so that one thread has a job at a time; a timer for the nearest
// deadline; an event for jobs that are ready at once. The kernel wakes the thread that began to wait last, whose caches are warm.
//
// A small job that waits for its socket is run by the event loop itself, in `collect`: waking a thread and being woken by it
// costs two times 10 to 50 us, as much as a small read takes. `fd()` is an epoll descriptor of its own for that: readable when
// such a socket is, or when jobs are done. What may be under way like this at once is bounded by loop_bytes, and a job that
// has had kLoopTurns of it (a slow network, a peer that sends byte by byte) goes on in the threads.
//
// Invariants
// - A submitted job comes back from `collect` exactly once, whatever happens; it is destroyed only by who collected it (or
//   with the Movers), never in a mover thread, because jobs may hold Python objects.
// - advance and end are never called at the same time. A job that is done is not called again.
// - A job that does not run ends at its deadline, a running one at the end of its turn after it.
// - READY is first in, first out: turns go round.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "net.hpp"
#include "slot.hpp"
#include "stream.hpp"

namespace kvdir {

constexpr unsigned kLoopTurns = 32;

class Job {
  public:
    virtual ~Job() = default;
    // Goes on as far as it can without waiting, for a turn at most. NOTHING: done.
    virtual Need advance() noexcept = 0;
    // Done now: LATE or PEER_LOST for what is missing. Must not block.
    virtual void end(Status status) noexcept = 0;
    // While another thread is in advance: make that return soon. Must not block.
    virtual void interrupt() noexcept = 0;
    // Of what it waits for.
    virtual int fd() const noexcept { return -1; }

    uint64_t ticket = 0;
    uint64_t deadline_ns = 0;
    uint64_t bytes = 0;  // what it will move; 0: not known, so not for the event loop
};

class Movers {
  public:
    // Throws std::runtime_error when the system gives no descriptor or thread.
    Movers(size_t threads, uint64_t loop_bytes);
    ~Movers();

    int fd() const { return loop_epoll_.get(); }
    // need: what the job, as far as it has begun, waits for. Throws std::runtime_error when closed.
    uint64_t submit(std::unique_ptr<Job> job, Need need = Need::TURN);
    void abort(uint64_t ticket);
    // Will `collect` move bytes, which is worth releasing a lock for?
    bool has_loop_jobs();
    // One turn of each small job whose socket is ready; then all jobs that are done.
    std::vector<std::unique_ptr<Job>> collect();
    // Ends every job and joins the threads; what has ended can still be collected.
    void close();

  private:
    enum class At : uint8_t { READY, RUNNING, WAITING };
    struct Task {
        std::unique_ptr<Job> job;
        At at = At::READY;
        bool aborted = false;
        bool in_loop = false;  // waits in loop_epoll_ and is run by collect
        unsigned loop_turns = 0;
    };
    using Tasks = std::unordered_map<uint64_t, Task>;

    void work();
    void run(std::unique_lock<std::mutex>& guard);
    void advance(Tasks::iterator at, std::unique_lock<std::mutex>& guard);
    void run_in_loop(std::unique_lock<std::mutex>& guard);
    void leave_loop(Task& task);
    void dispatch(uint64_t what);
    void place(Tasks::iterator at, Need need);
    bool watch(const Task& task, Need need);
    void finish(Tasks::iterator at);
    void stop(Tasks::iterator at);
    void expire();
    void arm();
    void kick();

    const uint64_t loop_bytes_;
    Fd loop_epoll_, done_fd_, epoll_, kick_, timer_;
    std::mutex mutex_;  // guards everything below but threads_
    bool closing_ = false;
    bool collecting_ = false;   // collect will look at done_ anyway
    bool signalled_ = false;    // done_fd_ is readable
    uint64_t in_loop_bytes_ = 0;  // of tasks in_loop
    size_t idle_threads_ = 0;  // that wait, or are about to
    uint64_t last_ticket_;
    Tasks tasks_;                                       // not done
    std::deque<uint64_t> ready_;                        // tickets; those that are done meanwhile are passed over
    std::set<std::pair<uint64_t, uint64_t>> deadlines_;  // (deadline, ticket) of tasks, until it has passed
    uint64_t armed_ns_ = 0;                             // what the timer is set to; 0: not set
    std::vector<std::unique_ptr<Job>> done_;
    std::vector<std::thread> threads_;
};

// A thread that leaves all signals to Python's main thread.
std::thread start_thread(void (*body)(void*), void* argument);

}  // namespace kvdir
