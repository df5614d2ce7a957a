#include "movers.hpp"

#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>

namespace kvdir {

std::thread start_thread(void (*body)(void*), void* argument) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // inherited by the new thread
    std::thread thread(body, argument);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
}

Movers::Movers(size_t threads) : done_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!done_fd_) throw std::runtime_error("cannot create an event descriptor: " + error_text(errno));
    try {
        for (size_t i = 0; i < threads; ++i)
            threads_.push_back(start_thread([](void* self) { static_cast<Movers*>(self)->work(); }, this));
    } catch (...) {  // the system gives no more threads: end those that run, or their destructors would end the process
        close();
        throw;
    }
}

Movers::~Movers() { close(); }

uint64_t Movers::submit(std::unique_ptr<Job> job) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (closing_) throw std::runtime_error("the movers are closed");
    const uint64_t ticket = job->ticket = ++last_ticket_;
    live_[ticket] = job.get();
    queued_.push_back(std::move(job));
    wake_.notify_one();
    return ticket;
}

void Movers::abort(uint64_t ticket) {
    const std::lock_guard<std::mutex> guard(mutex_);  // keeps the job alive meanwhile
    const auto at = live_.find(ticket);
    if (at != live_.end()) at->second->abort();
}

std::vector<std::unique_ptr<Job>> Movers::collect() {
    uint64_t count = 0;
    while (read(done_fd_.get(), &count, sizeof count) < 0 && errno == EINTR) {
    }
    const std::lock_guard<std::mutex> guard(mutex_);
    return std::exchange(done_, {});
}

void Movers::close() {
    {
        const std::lock_guard<std::mutex> guard(mutex_);
        closing_ = true;
        for (const auto& [ticket, job] : live_) job->abort();
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

void Movers::work() {
    std::unique_lock<std::mutex> guard(mutex_);
    while (true) {
        wake_.wait(guard, [this] { return closing_ || !queued_.empty(); });
        if (queued_.empty()) return;  // closing, and nothing left that would have to come back
        std::unique_ptr<Job> job = std::move(queued_.front());
        queued_.pop_front();
        guard.unlock();
        job->run();
        guard.lock();
        live_.erase(job->ticket);
        done_.push_back(std::move(job));
        const uint64_t one = 1;
        while (write(done_fd_.get(), &one, sizeof one) < 0 && errno == EINTR) {
        }
    }
}

}  // namespace kvdir
