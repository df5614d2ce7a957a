#include "tcp_client.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "clock.hpp"

namespace kvdir {
namespace {

// One recvmsg takes at most this much, so that it is hashed while still in the cache.
constexpr size_t kReceiveBytes = 256 << 10;
constexpr size_t kIovMax = 64;
constexpr const char* kNoHello =
    "the peer closed the connection without a hello: too many connections there, or no kvdir tcp data plane";

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

// Receives exactly `bytes`; throws std::runtime_error with the reason.
void receive_all(int fd, void* into, size_t bytes, uint64_t deadline_ns) {
    auto* at = static_cast<uint8_t*>(into);
    while (bytes != 0) {
        const ssize_t got = recv(fd, at, bytes, 0);
        if (got > 0) {
            at += got;
            bytes -= static_cast<size_t>(got);
        } else if (got == 0) {
            throw std::runtime_error(kNoHello);
        } else if (would_block(errno)) {
            if (!wait_for(fd, POLLIN, deadline_ns)) throw std::runtime_error("the peer took the connection but said no hello in time");
        } else if (errno == ECONNRESET) {
            throw std::runtime_error(kNoHello);
        } else if (errno != EINTR) {
            throw std::runtime_error("connection lost before the peer's hello: " + error_text(errno));
        }
    }
}

}  // namespace

TcpClient::TcpClient(const std::string& host, uint16_t port, uint64_t deadline_ns) : fd_(connect_to(host, port, deadline_ns)) {
    wire::Hello hello{};
    hello.magic = wire::kHelloMagic;
    hello.version = wire::kVersion;
    if (send(fd_.get(), &hello, sizeof hello, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof hello))
        throw std::runtime_error("cannot say hello: " + error_text(errno));
    receive_all(fd_.get(), &hello, sizeof hello, deadline_ns);
    if (hello.magic != wire::kHelloMagic) throw std::runtime_error("the peer is not a kvdir tcp data plane (wrong magic)");
    if (hello.version != wire::kVersion)
        throw std::runtime_error("the peer speaks version " + std::to_string(hello.version) + " of the tcp data plane, we speak " +
                                 std::to_string(wire::kVersion) + "; upgrade the older agent");
    epoch_ = hello.epoch;
}

void TcpClient::close() {
    const std::lock_guard<std::mutex> guard(mutex_);
    broken_.store(true, std::memory_order_release);
    if (fd_) ::shutdown(fd_.get(), SHUT_RDWR);  // wakes a read in progress, which then closes fd_
    if (!busy_) fd_.reset();
}

// Called by who has the connection: nothing more may arrive on it.
void TcpClient::give_up() {
    const std::lock_guard<std::mutex> guard(mutex_);
    broken_.store(true, std::memory_order_release);
    fd_.reset();
}

// Having the connection: ends with the object. Made by who has just set busy_.
class TcpClient::Turn {
  public:
    explicit Turn(TcpClient& client) : client_(&client) {}
    Turn(Turn&& other) noexcept : client_(std::exchange(other.client_, nullptr)) {}
    ~Turn() {
        if (client_ == nullptr) return;
        const std::lock_guard<std::mutex> guard(client_->mutex_);
        if (client_->broken()) client_->fd_.reset();
        client_->busy_ = false;
        client_->turn_.notify_one();
    }

  private:
    TcpClient* client_;
};

// One `read`: what was asked, what has arrived, and which statuses follow from it.
class TcpClient::Reading {
  public:
    Reading(Turn turn, TcpClient& client, const ReadJob& job, uint8_t* statuses)
        : turn_(std::move(turn)), client_(client), fd_(client.fd_.get()), job_(job), statuses_(statuses) {
        for (uint32_t i = 0; i < job.blocks.count; ++i) {
            statuses_[i] = job.records[i].state != 1 ? ABSENT : job.destinations[i] == nullptr ? CORRUPT : PEER_LOST;
            if (statuses_[i] == PEER_LOST) asked_.push_back(i);
        }
        plan_groups();
    }

    ~Reading() {
        if (sent_ && !finished_) client_.give_up();
    }
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;

    // Sends as much of the requests as the socket takes at once. Whatever goes wrong here shows itself in `finish`.
    void begin() {
        if (groups_.empty() || client_.broken() || job_.epoch != client_.epoch_ || expired(job_.deadline_ns)) return;
        write_requests();
        sent_ = true;
        send_requests();
    }

    void finish() {
        finished_ = true;
        if (client_.broken()) return fill_rest(PEER_LOST);
        if (job_.epoch != client_.epoch_) return fill_rest(STALE);
        if (groups_.empty()) return;
        if (!sent_) return fill_rest(LATE);  // nothing was asked, so the connection stays good
        const Status state = run();
        fill_rest(state == LATE ? LATE : PEER_LOST);
        if (state != OK) client_.give_up();
    }

  private:
    // PEER_LOST: the connection broke or the peer broke the protocol. LATE: deadline. OK: every block has its status.
    Status run() {
        segments_.push_back(head_segment(0));
        Status state = fill();
        for (size_t g = 0; g < groups_.size() && state == OK; ++g) {
            if (!begin_group(g)) return PEER_LOST;
            state = fill();
            if (state == OK && !end_group(g)) return PEER_LOST;
        }
        return state;
    }

    // Blocks that were asked for and have no verdict.
    void fill_rest(Status status) {
        for (const uint32_t i : asked_)
            if (statuses_[i] == PEER_LOST) statuses_[i] = status;
    }

    static constexpr uint32_t kControl = UINT32_MAX;

    struct Planned {
        uint32_t tag, first, count, asked;  // positions in request `tag`; index into asked_ of the first
    };
    struct Segment {
        uint8_t* at;
        size_t bytes;
        uint32_t slot;  // position within the group, or kControl
        size_t done = 0;
    };
    struct Head {
        wire::Group group;
        uint8_t statuses[wire::padded_statuses(wire::kGroupBlocks)];
    };

    const Record& record(uint32_t asked) const { return job_.records[asked_[asked]]; }

    // The requests and, by the rule of wire.hpp, the groups in which the owner will answer them.
    void plan_groups() {
        const auto total = static_cast<uint32_t>(asked_.size());
        for (uint32_t begin = 0, tag = 1; begin < total; begin += wire::kMaxRequestBlocks, ++tag) {
            const uint32_t count = std::min(wire::kMaxRequestBlocks, total - begin);
            for (uint32_t first = 0; first < count;) {
                const uint32_t end =
                    wire::group_end(first, count, [&](uint32_t i) { return uint64_t{record(begin + i).length}; });
                groups_.push_back({tag, first, end - first, begin + first});
                first = end;
            }
        }
    }

    void write_requests() {
        const auto total = static_cast<uint32_t>(asked_.size());
        for (uint32_t begin = 0, tag = 1; begin < total; begin += wire::kMaxRequestBlocks, ++tag) {
            const uint32_t count = std::min(wire::kMaxRequestBlocks, total - begin);
            const wire::Request request{wire::kRequestMagic, count, job_.lock, job_.epoch, tag, 0};
            append(&request, sizeof request);
            for (uint32_t i = begin; i < begin + count; ++i) {
                const wire::SlotRef ref{record(i).offset, record(i).generation, record(i).length, 0};
                append(&ref, sizeof ref);
            }
        }
        outgoing_.add(requests_.data(), requests_.size());
    }

    void append(const void* data, size_t bytes) {
        const auto* from = static_cast<const uint8_t*>(data);
        requests_.insert(requests_.end(), from, from + bytes);
    }

    Segment head_segment(size_t g) {
        Head& head = heads_[g % 2];
        return {reinterpret_cast<uint8_t*>(&head), sizeof(wire::Group) + wire::padded_statuses(groups_[g].count), kControl};
    }

    // Group g's head has arrived: plan its blocks, its trailers and the next head as one list of segments.
    bool begin_group(size_t g) {
        const Planned& plan = groups_[g];
        const Head& head = heads_[g % 2];
        if (head.group.magic != wire::kGroupMagic || head.group.tag != plan.tag || head.group.first != plan.first ||
            head.group.count != plan.count)
            return false;
        segments_.clear();
        at_ = 0;
        trailers_ = 0;
        for (uint32_t i = 0; i < plan.count; ++i) {
            if (head.statuses[i] > CORRUPT) return false;
            if (head.statuses[i] != OK) {
                statuses_[asked_[plan.asked + i]] = head.statuses[i];
                continue;
            }
            ++trailers_;
            segments_.push_back({reinterpret_cast<uint8_t*>(&headers_[i]), sizeof(SlotHeader), kControl});
            const size_t length = record(plan.asked + i).length;
            if (length != 0) segments_.push_back({job_.destinations[asked_[plan.asked + i]], length, i});
            checksums_[i] = kEmptyChecksum;
        }
        if (trailers_ != 0)
            segments_.push_back({reinterpret_cast<uint8_t*>(trailer_.data()), trailers_ * sizeof(wire::Trailer), kControl});
        if (g + 1 < groups_.size()) segments_.push_back(head_segment(g + 1));
        return true;
    }

    // Everything of group g has arrived: decide its blocks.
    bool end_group(size_t g) {
        const Planned& plan = groups_[g];
        const Head& head = heads_[g % 2];
        size_t t = 0;
        for (uint32_t i = 0; i < plan.count; ++i) {
            if (head.statuses[i] != OK) continue;
            const wire::Trailer& trailer = trailer_[t++];
            if (trailer.position != plan.first + i) return false;
            statuses_[asked_[plan.asked + i]] = decide(plan.asked + i, i, trailer);
        }
        return true;
    }

    Status decide(uint32_t asked, uint32_t i, const wire::Trailer& trailer) const {
        const Status before = verify_header(headers_[i], record(asked), job_.blocks[asked_[asked]]);
        if (before != OK) return before;
        if (trailer.generation_after != record(asked).generation) return TORN;
        return !job_.check || checksums_[i] == record(asked).checksum ? OK : CORRUPT;
    }

    // Receives until every segment is full, sending what is left of the requests whenever nothing is there to receive.
    Status fill() {
        while (at_ < segments_.size()) {
            const ssize_t got = receive_some();
            if (got > 0) {
                take(static_cast<size_t>(got));
                if (expired(job_.deadline_ns) && at_ < segments_.size()) return LATE;
                continue;
            }
            if (got == 0 || (!would_block(errno) && errno != EINTR)) return PEER_LOST;
            if (!send_requests()) return PEER_LOST;
            const short events = static_cast<short>(POLLIN | (outgoing_.done() ? 0 : POLLOUT));
            if (!wait_for(fd_, events, job_.deadline_ns)) return LATE;
        }
        return OK;
    }

    ssize_t receive_some() {
        std::array<iovec, kIovMax> parts;
        size_t count = 0, bytes = 0;
        for (size_t s = at_; s < segments_.size() && count < kIovMax && bytes < kReceiveBytes; ++s) {
            const Segment& segment = segments_[s];
            const size_t part = std::min(segment.bytes - segment.done, kReceiveBytes - bytes);
            parts[count++] = {segment.at + segment.done, part};
            bytes += part;
        }
        msghdr message{};
        message.msg_iov = parts.data();
        message.msg_iovlen = count;
        return recvmsg(fd_, &message, 0);
    }

    void take(size_t bytes) {
        while (bytes != 0) {
            Segment& segment = segments_[at_];
            const size_t part = std::min(bytes, segment.bytes - segment.done);
            if (segment.slot != kControl && job_.check) hash_part(segment, part);
            segment.done += part;
            bytes -= part;
            if (segment.done == segment.bytes) ++at_;
        }
    }

    // The checksum runs over what lies in our slot, piece by piece as it arrives.
    void hash_part(const Segment& segment, size_t part) {
        if (segment.done == 0 && part == segment.bytes) {
            checksums_[segment.slot] = hash64(segment.at, part);
            return;
        }
        if (segment.done == 0) hash_.reset();
        hash_.update(segment.at + segment.done, part);
        if (segment.done + part == segment.bytes) checksums_[segment.slot] = hash_.value();
    }

    bool send_requests() {
        while (!outgoing_.done()) {
            msghdr message{};
            message.msg_iov = outgoing_.parts();
            message.msg_iovlen = outgoing_.count();
            const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL);
            if (sent >= 0)
                outgoing_.advance(static_cast<size_t>(sent));
            else if (would_block(errno))
                return true;
            else if (errno != EINTR)
                return false;
        }
        return true;
    }

    const Turn turn_;
    TcpClient& client_;
    const int fd_;
    const ReadJob job_;
    uint8_t* const statuses_;
    const uint64_t kEmptyChecksum = hash64(nullptr, 0);

    std::vector<uint32_t> asked_;  // positions in the job that travel
    std::vector<Planned> groups_;
    std::vector<uint8_t> requests_;
    IoList outgoing_;
    bool sent_ = false, finished_ = false;

    std::vector<Segment> segments_;
    size_t at_ = 0;  // first segment that is not full
    size_t trailers_ = 0;
    std::array<Head, 2> heads_{};
    std::array<SlotHeader, wire::kGroupBlocks> headers_{};
    std::array<wire::Trailer, wire::kGroupBlocks> trailer_{};
    std::array<uint64_t, wire::kGroupBlocks> checksums_{};
    PieceHash hash_;
};

void TcpClient::DeleteReading::operator()(Reading* reading) const { delete reading; }

TcpClient::ReadingPtr TcpClient::try_begin(const ReadJob& job, uint8_t* statuses) {
    std::unique_lock<std::mutex> guard(mutex_);
    if (busy_) return nullptr;
    busy_ = true;
    guard.unlock();
    ReadingPtr reading(new Reading(Turn(*this), *this, job, statuses));
    reading->begin();
    return reading;
}

void TcpClient::finish(ReadingPtr reading) { reading->finish(); }

void TcpClient::read(const ReadJob& job, uint8_t* statuses) {
    const std::chrono::steady_clock::time_point until{std::chrono::nanoseconds(job.deadline_ns)};  // CLOCK_MONOTONIC
    std::unique_lock<std::mutex> guard(mutex_);
    if (!turn_.wait_until(guard, until, [this] { return !busy_; })) {
        std::fill_n(statuses, job.blocks.count, static_cast<uint8_t>(LATE));
        return;
    }
    busy_ = true;
    guard.unlock();
    Reading reading(Turn(*this), *this, job, statuses);
    reading.begin();
    reading.finish();
}

}  // namespace kvdir
