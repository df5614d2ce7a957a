// Native threads that run reads, so that neither starting nor ending one waits for Python's lock.
//
//   event loop            mover thread
//     submit(job) ------->  queue -> job.run()        the loop goes on; no GIL in run()
//     fd() readable <-----  done list, eventfd
//     collect() -> jobs
//
// Invariants: a submitted job comes back from `collect` exactly once, whatever happens; a job is destroyed only by who
// collected it (or by close), never in a mover thread, because jobs may hold Python objects.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "net.hpp"

namespace kvdir {

class Job {
  public:
    virtual ~Job() = default;
    // Ends by the job's own deadline and throws nothing.
    virtual void run() noexcept = 0;
    // From any thread, before or during run: make it end soon. Must not block.
    virtual void abort() noexcept = 0;

    uint64_t ticket = 0;
};

class Movers {
  public:
    // Throws std::runtime_error when the system gives no descriptor.
    explicit Movers(size_t threads);
    ~Movers();

    int fd() const { return done_fd_.get(); }
    uint64_t submit(std::unique_ptr<Job> job);
    void abort(uint64_t ticket);
    std::vector<std::unique_ptr<Job>> collect();
    // Aborts what is queued or running and joins the threads; finished jobs can still be collected.
    void close();

  private:
    void work();

    Fd done_fd_;
    std::mutex mutex_;  // guards everything below but threads_
    std::condition_variable wake_;
    bool closing_ = false;
    uint64_t last_ticket_ = 0;
    std::deque<std::unique_ptr<Job>> queued_;
    std::unordered_map<uint64_t, Job*> live_;  // queued or running
    std::vector<std::unique_ptr<Job>> done_;
    std::vector<std::thread> threads_;
};

// A thread that leaves all signals to Python's main thread.
std::thread start_thread(void (*body)(void*), void* argument);

}  // namespace kvdir
