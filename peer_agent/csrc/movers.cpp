#include "movers.hpp"

#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>

#include "clock.hpp"

namespace kvdir {
namespace {

// What an epoll event is about: one of these, or a ticket.
constexpr uint64_t kKick = 0, kTimer = 1, kDone = 2, kFirstTicket = 3;

void signal_event(const Fd& event) {
    const uint64_t one = 1;
    while (write(event.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
}

uint32_t epoll_events(Need need) {
    return EPOLLONESHOT | (need != Need::WRITE ? EPOLLIN | EPOLLRDHUP : 0U) | (need != Need::READ ? EPOLLOUT : 0U);
}

void add(const Fd& epoll, const Fd& fd, uint32_t events, uint64_t what) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = what;
    if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd.get(), &event) != 0)
        throw std::runtime_error("cannot watch an event descriptor: " + error_text(errno));
}

}  // namespace

std::thread start_thread(void (*body)(void*), void* argument) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // inherited by the new thread
    std::thread thread(body, argument);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
}

Movers::Movers(size_t threads, uint64_t loop_bytes)
    : loop_bytes_(loop_bytes),
      loop_epoll_(epoll_create1(EPOLL_CLOEXEC)),
      done_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      kick_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      timer_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)),
      last_ticket_(kFirstTicket - 1) {
    if (!loop_epoll_ || !done_fd_ || !epoll_ || !kick_ || !timer_)
        throw std::runtime_error("cannot create an event descriptor: " + error_text(errno));
    add(loop_epoll_, done_fd_, EPOLLIN, kDone);
    // Edges: each write and each expiry wakes one thread, and nobody has to read them.
    add(epoll_, kick_, EPOLLIN | EPOLLET, kKick);
    add(epoll_, timer_, EPOLLIN | EPOLLET, kTimer);
    try {
        for (size_t i = 0; i < threads; ++i)
            threads_.push_back(start_thread([](void* self) { static_cast<Movers*>(self)->work(); }, this));
    } catch (...) {  // the system gives no more threads: end those that run, or their destructors would end the process
        close();
        throw;
    }
}

Movers::~Movers() { close(); }

uint64_t Movers::submit(std::unique_ptr<Job> job, Need need) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (closing_) throw std::runtime_error("the movers are closed");
    const uint64_t ticket = job->ticket = ++last_ticket_;
    if (job->deadline_ns != 0) deadlines_.emplace(job->deadline_ns, ticket);
    const auto at = tasks_.emplace(ticket, Task{std::move(job)}).first;
    Task& task = at->second;
    if (need != Need::TURN && task.job->bytes != 0 && task.job->bytes <= loop_bytes_ - in_loop_bytes_) {
        task.in_loop = true;
        in_loop_bytes_ += task.job->bytes;
    }
    place(at, need);
    if (!ready_.empty()) kick();
    arm();
    return ticket;
}

void Movers::abort(uint64_t ticket) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto at = tasks_.find(ticket);
    if (at != tasks_.end()) stop(at);
}

bool Movers::has_loop_jobs() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return in_loop_bytes_ != 0;
}

std::vector<std::unique_ptr<Job>> Movers::collect() {
    std::unique_lock<std::mutex> guard(mutex_);
    collecting_ = true;
    if (in_loop_bytes_ != 0) run_in_loop(guard);
    collecting_ = false;
    if (std::exchange(signalled_, false)) {
        uint64_t count = 0;
        while (read(done_fd_.get(), &count, sizeof count) < 0 && errno == EINTR) {
        }
    }
    return std::exchange(done_, {});
}

void Movers::run_in_loop(std::unique_lock<std::mutex>& guard) {
    epoll_event events[16];
    guard.unlock();
    const int ready = epoll_wait(loop_epoll_.get(), events, 16, 0);
    guard.lock();
    for (int i = 0; i < ready; ++i) {
        const auto at = tasks_.find(events[i].data.u64);
        if (at == tasks_.end() || at->second.at != At::WAITING) continue;
        ++at->second.loop_turns;
        advance(at, guard);
    }
    if (!ready_.empty()) kick();  // jobs that turned out to be long
}

// A job that goes on in the threads, or is done.
void Movers::leave_loop(Task& task) {
    if (!std::exchange(task.in_loop, false)) return;
    in_loop_bytes_ -= task.job->bytes;
}

void Movers::close() {
    {
        const std::lock_guard<std::mutex> guard(mutex_);
        closing_ = true;
        for (auto at = tasks_.begin(); at != tasks_.end();) stop(at++);
        kick();
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

void Movers::work() {
    std::unique_lock<std::mutex> guard(mutex_);
    while (!closing_) {
        run(guard);
        const bool idle = ready_.empty() && !closing_;  // else only a look at what else has become ready
        idle_threads_ += idle;
        guard.unlock();
        epoll_event event;
        const int ready = epoll_wait(epoll_.get(), &event, 1, idle ? -1 : 0);
        guard.lock();
        idle_threads_ -= idle;
        if (ready == 1) dispatch(event.data.u64);
    }
    kick();  // the next thread
}

// One turn of the job that has been ready for longest.
void Movers::run(std::unique_lock<std::mutex>& guard) {
    while (!ready_.empty()) {
        const auto at = tasks_.find(ready_.front());
        ready_.pop_front();
        if (at == tasks_.end()) continue;
        if (!ready_.empty()) kick();
        return advance(at, guard);
    }
}

void Movers::advance(Tasks::iterator at, std::unique_lock<std::mutex>& guard) {
    at->second.at = At::RUNNING;
    Job& job = *at->second.job;
    guard.unlock();
    const Need need = job.advance();
    guard.lock();
    place(tasks_.find(job.ticket), need);  // others may have come and gone: iterators do not last
}

void Movers::dispatch(uint64_t what) {
    if (what == kTimer) return expire();
    const auto at = tasks_.find(what);
    if (at == tasks_.end() || at->second.at != At::WAITING) return;  // kKick, or ended while the event was on its way
    at->second.at = At::READY;
    ready_.push_back(what);
}

// Where a job goes that nobody runs.
void Movers::place(Tasks::iterator at, Need need) {
    Task& task = at->second;
    if (need == Need::NOTHING) return finish(at);
    if (task.aborted || expired(task.job->deadline_ns)) {
        task.job->end(task.aborted ? PEER_LOST : LATE);
        return finish(at);
    }
    task.at = need == Need::TURN ? At::READY : At::WAITING;
    if (need == Need::TURN) {
        leave_loop(task);
        return ready_.push_back(at->first);
    }
    if (task.loop_turns == kLoopTurns) leave_loop(task);
    if (watch(task, need)) return;
    task.job->end(PEER_LOST);
    finish(at);
}

bool Movers::watch(const Task& task, Need need) {
    const int epoll = (task.in_loop ? loop_epoll_ : epoll_).get();
    epoll_event event{};
    event.events = epoll_events(need);
    event.data.u64 = task.job->ticket;
    if (epoll_ctl(epoll, EPOLL_CTL_MOD, task.job->fd(), &event) == 0) return true;
    return errno == ENOENT && epoll_ctl(epoll, EPOLL_CTL_ADD, task.job->fd(), &event) == 0;
}

void Movers::finish(Tasks::iterator at) {
    deadlines_.erase({at->second.job->deadline_ns, at->first});
    leave_loop(at->second);
    done_.push_back(std::move(at->second.job));
    tasks_.erase(at);
    if (collecting_ || std::exchange(signalled_, true)) return;
    signal_event(done_fd_);
}

void Movers::stop(Tasks::iterator at) {
    Task& task = at->second;
    if (task.at == At::RUNNING) {
        task.aborted = true;
        return task.job->interrupt();
    }
    task.job->end(PEER_LOST);
    finish(at);
}

// Ends what is beyond its deadline; who runs finds out by itself.
void Movers::expire() {
    armed_ns_ = 0;
    const uint64_t now = now_ns();
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
        const auto at = tasks_.find(deadlines_.begin()->second);
        deadlines_.erase(deadlines_.begin());
        if (at->second.at == At::RUNNING) continue;
        at->second.job->end(LATE);
        finish(at);
    }
    arm();
}

void Movers::arm() {
    if (deadlines_.empty()) return;
    const uint64_t nearest = deadlines_.begin()->first;
    if (armed_ns_ != 0 && armed_ns_ <= nearest) return;
    itimerspec at{};
    at.it_value.tv_sec = static_cast<time_t>(nearest / 1000000000ULL);
    at.it_value.tv_nsec = static_cast<long>(nearest % 1000000000ULL);
    timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &at, nullptr);
    armed_ns_ = nearest;
}

// Wakes a thread if one waits; the others look at ready_ anyway when their turn is over.
void Movers::kick() {
    if (idle_threads_ != 0 || closing_) signal_event(kick_);
}

}  // namespace kvdir
