// Jobs that take turns, wait, are late, aborted or closed at any time: each comes back exactly once, and none holds a thread.
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <unordered_map>

#include "check.hpp"
#include "clock.hpp"
#include "movers.hpp"

using namespace kvdir;

namespace {

constexpr uint64_t kMs = 1000000;

uint64_t soon(uint64_t ms = 20000) { return now_ns() + ms * kMs; }

struct Pair {
    Fd ours, theirs;
    Pair() {
        int fds[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds) == 0);
        ours = Fd(fds[0]);
        theirs = Fd(fds[1]);
    }
};

bool poke(const Fd& peer) { return send(peer.get(), "x", 1, MSG_NOSIGNAL) == 1; }

enum class Ended : int { NOT, BY_ITSELF, LATE, ABORTED };

// Takes some turns; between them waits for a byte of its socket if it has one. Checks that it is never called twice at once.
class ProbeJob final : public Job {
  public:
    ProbeJob(Fd socket, uint64_t turns, uint64_t deadline) : socket_(std::move(socket)), turns_(turns) { deadline_ns = deadline; }
    Need advance() noexcept override {
        enter();
        for (uint64_t spins = below_here(20); !stop_.load() && spins > 0; --spins) std::this_thread::yield();
        char byte;
        const bool moved = !socket_ || ::read(socket_.get(), &byte, 1) == 1;
        if (moved && turns_ > 0) --turns_;
        const bool done = stop_.load() || turns_ == 0;
        if (done) ended = Ended::BY_ITSELF;
        leave();
        return done ? Need::NOTHING : socket_ ? Need::READ : Need::TURN;
    }
    void end(Status status) noexcept override {
        enter();
        CHECK(status == LATE || status == PEER_LOST);
        ended = status == LATE ? Ended::LATE : Ended::ABORTED;
        leave();
    }
    void interrupt() noexcept override { stop_ = true; }
    int fd() const noexcept override { return socket_.get(); }

    Ended ended = Ended::NOT;

  private:
    void enter() {
        CHECK(!busy_.exchange(true));
        CHECK(ended == Ended::NOT);
    }
    void leave() { busy_ = false; }
    uint64_t below_here(uint64_t limit) { return ((seed_ = seed_ * 6364136223846793005ULL + 1) >> 33) % limit; }

    const Fd socket_;
    uint64_t turns_;
    uint64_t seed_ = below(1 << 20);
    std::atomic<bool> busy_{false}, stop_{false};
};

void collect_into(Movers& movers, std::unordered_map<uint64_t, Ended>& found) {
    for (const auto& job : movers.collect()) {
        const Ended ended = static_cast<ProbeJob&>(*job).ended;
        CHECK(ended != Ended::NOT);
        CHECK(found.emplace(job->ticket, ended).second);  // once
    }
}

std::unordered_map<uint64_t, Ended> collect_until(Movers& movers, size_t count) {
    std::unordered_map<uint64_t, Ended> found;
    while (found.size() < count) {
        CHECK(wait_for(movers.fd(), short{POLLIN}, soon()));
        collect_into(movers, found);
    }
    return found;
}

}  // namespace

TEST(every_job_comes_back_once_whatever_is_ready_aborted_late_or_closed) {
    for (int round = 0; round < 300; ++round) {
        Movers movers(1 + below(4), below(40));
        std::vector<Fd> peers;
        std::unordered_map<uint64_t, Ended> found;
        const uint64_t submitted = below(60);
        for (uint64_t i = 0; i < submitted; ++i) {
            Fd socket;
            if (below(2) != 0) {
                Pair pair;
                socket = std::move(pair.ours);
                peers.push_back(std::move(pair.theirs));
            }
            const Need need = socket ? Need::READ : Need::TURN;
            const uint64_t deadline = below(3) == 0 ? soon(below(3)) : soon();
            auto job = std::make_unique<ProbeJob>(std::move(socket), below(5), deadline);
            job->bytes = below(20);  // some are run by collect
            const uint64_t ticket = movers.submit(std::move(job), need);
            if (below(4) == 0) movers.abort(1 + ticket - below(4));
            for (const Fd& peer : peers)
                if (below(4) == 0) poke(peer);
            if (below(4) == 0) collect_into(movers, found);
        }
        if (round % 2 == 0) {
            peers.clear();  // end of stream: sockets stay readable, so waiting jobs run until they are late or aborted
            for (uint64_t ticket = 0; ticket < submitted + 4; ++ticket) movers.abort(ticket);
            while (found.size() < submitted) {
                CHECK(wait_for(movers.fd(), short{POLLIN}, soon()));
                collect_into(movers, found);
            }
        }
        movers.close();
        movers.close();
        collect_into(movers, found);
        CHECK(found.size() == submitted);
    }
}

TEST(silent_peers_cost_others_nothing_when_they_are_more_than_the_threads) {
    Movers movers(2, 0);
    std::vector<Fd> silent;
    for (int i = 0; i < 200; ++i) {
        Pair pair;
        movers.submit(std::make_unique<ProbeJob>(std::move(pair.ours), 1, soon()), Need::READ);
        silent.push_back(std::move(pair.theirs));
    }
    for (int i = 0; i < 50; ++i) {
        Pair pair;
        const uint64_t ticket = movers.submit(std::make_unique<ProbeJob>(std::move(pair.ours), 1, soon()), Need::READ);
        CHECK(poke(pair.theirs));
        const auto found = collect_until(movers, 1);
        CHECK(found.size() == 1 && found.at(ticket) == Ended::BY_ITSELF);
    }
    for (const Fd& peer : silent) CHECK(poke(peer));
    for (const auto& [ticket, ended] : collect_until(movers, silent.size())) CHECK(ended == Ended::BY_ITSELF);
}

TEST(waiting_jobs_end_at_their_own_deadlines_in_any_order_of_submission) {
    Movers movers(2, 0);
    std::vector<Fd> silent;
    const uint64_t begun = now_ns();
    for (const uint64_t ms : {60, 20, 40, 20000}) {
        Pair pair;
        movers.submit(std::make_unique<ProbeJob>(std::move(pair.ours), 1, begun + ms * kMs), Need::READ);
        silent.push_back(std::move(pair.theirs));
    }
    const auto found = collect_until(movers, 3);
    CHECK(now_ns() - begun >= 60 * kMs);
    for (const auto& [ticket, ended] : found) CHECK(ended == Ended::LATE);
    Pair pair;
    movers.submit(std::make_unique<ProbeJob>(std::move(pair.ours), 1, begun), Need::READ);  // too late from the start
    CHECK(collect_until(movers, 1).begin()->second == Ended::LATE);
}

TEST(aborted_jobs_end_at_once_without_a_thread) {
    Movers movers(1, 0);
    Pair pair;
    const uint64_t ticket = movers.submit(std::make_unique<ProbeJob>(std::move(pair.ours), 1, soon()), Need::READ);
    movers.abort(ticket);
    const auto jobs = movers.collect();  // without waiting
    CHECK(jobs.size() == 1 && static_cast<ProbeJob&>(*jobs[0]).ended == Ended::ABORTED);
}

TEST(long_jobs_take_turns_with_short_ones) {
    Movers movers(1, 0);
    const uint64_t endless = movers.submit(std::make_unique<ProbeJob>(Fd(), UINT64_MAX, soon()));
    for (int i = 0; i < 20; ++i) {
        movers.submit(std::make_unique<ProbeJob>(Fd(), 1, soon()));
        CHECK(collect_until(movers, 1).begin()->second == Ended::BY_ITSELF);
    }
    movers.abort(endless);
    CHECK(collect_until(movers, 1).count(endless) == 1);
}

TEST(small_jobs_are_run_by_who_collects_and_large_ones_by_threads) {
    Movers movers(1, 100);
    Pair small, large;
    const auto here = std::this_thread::get_id();
    struct WhereJob final : Job {
        std::thread::id ran;
        int socket;
        WhereJob(int fd, uint64_t size) : socket(fd) { bytes = size; }
        Need advance() noexcept override { return ran = std::this_thread::get_id(), Need::NOTHING; }
        void end(Status) noexcept override {}
        void interrupt() noexcept override {}
        int fd() const noexcept override { return socket; }
    };
    const uint64_t first = movers.submit(std::make_unique<WhereJob>(small.ours.get(), 60), Need::READ);
    movers.submit(std::make_unique<WhereJob>(large.ours.get(), 60), Need::READ);  // together more than 100
    CHECK(movers.has_loop_jobs() && poke(small.theirs) && poke(large.theirs));
    for (size_t count = 0; count < 2;) {
        CHECK(wait_for(movers.fd(), short{POLLIN}, soon()));
        for (const auto& job : movers.collect()) {
            CHECK((static_cast<WhereJob&>(*job).ran == here) == (job->ticket == first));
            ++count;
        }
    }
    CHECK(!movers.has_loop_jobs());
}

TEST(jobs_whose_bytes_come_one_by_one_leave_the_loop) {
    Movers movers(1, 100);
    Pair pair;
    struct DripJob final : Job {
        const int socket;
        unsigned here = 0;  // turns in the thread that collects
        const std::thread::id collector = std::this_thread::get_id();
        explicit DripJob(int fd) : socket(fd) { bytes = 1; }
        Need advance() noexcept override {
            char byte;
            CHECK(::read(socket, &byte, 1) == 1);
            const bool collects = std::this_thread::get_id() == collector;
            here += collects;
            return collects ? Need::READ : Need::NOTHING;
        }
        void end(Status) noexcept override {}
        void interrupt() noexcept override {}
        int fd() const noexcept override { return socket; }
    };
    movers.submit(std::make_unique<DripJob>(pair.ours.get()), Need::READ);
    std::vector<std::unique_ptr<Job>> ended;
    for (unsigned turn = 0; ended.empty(); ++turn) {
        CHECK(turn <= kLoopTurns && poke(pair.theirs));
        CHECK(wait_for(movers.fd(), short{POLLIN}, soon()));
        ended = movers.collect();
    }
    CHECK(static_cast<DripJob&>(*ended[0]).here == kLoopTurns);
}
