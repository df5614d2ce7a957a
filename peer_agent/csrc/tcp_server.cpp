#include "tcp_server.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "clock.hpp"
#include "movers.hpp"

namespace kvdir {
namespace {

constexpr uint64_t kSecond = 1000000000ULL;
constexpr uint64_t kHelloPatience = 5 * kSecond;     // connected, has not said hello
constexpr uint64_t kRequestPatience = 10 * kSecond;  // half a request received
constexpr uint64_t kDrainPatience = 30 * kSecond;    // does not take its answer
constexpr uint64_t kIdleBeforeGivingWay = 10 * kSecond;
constexpr int kSweepMs = 1000;
constexpr size_t kTurnBytes = 4 << 20;
constexpr size_t kInputBytes = sizeof(wire::Request) + wire::kMaxRequestBlocks * sizeof(wire::SlotRef);
constexpr size_t kIovMax = 1024;
constexpr uint32_t kIdleEvents = EPOLLIN | EPOLLRDHUP;
constexpr uint32_t kBlockedEvents = EPOLLOUT | EPOLLRDHUP;

void append(std::vector<uint8_t>& buffer, const void* data, size_t bytes) {
    const auto* from = static_cast<const uint8_t*>(data);
    buffer.insert(buffer.end(), from, from + bytes);
}

}  // namespace

const Record* Grant::find(uint64_t offset) const {
    const auto at = std::lower_bound(records.begin(), records.end(), offset,
                                     [](const Record& record, uint64_t wanted) { return record.offset < wanted; });
    return at != records.end() && at->offset == offset ? &*at : nullptr;
}

struct TcpServer::Connection {
    Fd fd;
    uint32_t watched = kIdleEvents;
    uint64_t progress_ns = 0;  // when bytes last moved
    bool greeted = false;
    bool last_words = false;      // close once `out` is sent
    std::vector<uint8_t> input;   // at most kInputBytes
    IoList out;                   // points into `control`, `headers` and the arena
    std::vector<uint8_t> control;

    // The answer under way. Positions below `first` are done, [first, end) is the group in `out`.
    bool answering = false;
    bool trailers_due = false;
    wire::Request request{};
    std::vector<wire::SlotRef> refs;
    std::shared_ptr<const Grant> grant;
    uint32_t first = 0, end = 0;
    std::array<uint8_t, wire::kGroupBlocks> statuses{};
    std::array<SlotHeader, wire::kGroupBlocks> headers{};

    bool idle() const { return greeted && !answering && input.empty() && out.done(); }
};

TcpServer::TcpServer(Region region, uint64_t epoch, const std::string& host, uint16_t port, size_t max_connections)
    : region_(std::move(region)), epoch_(epoch), max_connections_(max_connections) {
    if (max_connections == 0) throw std::invalid_argument("max_connections must be at least 1");
    listener_ = listen_on(host, port, &port_);
    epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
    wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!epoll_ || !wake_) throw std::runtime_error("cannot create the tcp plane's event loop: " + error_text(errno));
    for (const int fd : {listener_.get(), wake_.get()}) {
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.fd = fd;
        epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
    }
    thread_ = start_thread([](void* self) { static_cast<TcpServer*>(self)->run(); }, this);
}

TcpServer::~TcpServer() { close(); }

void TcpServer::close() {
    const std::lock_guard<std::mutex> guard(close_mutex_);
    if (!thread_.joinable()) return;
    const uint64_t one = 1;
    while (write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
    thread_.join();
    connections_.clear();
    listener_.reset();
    stats_.connections = 0;
}

void TcpServer::grant(uint64_t lock, const Record* records, size_t count, uint64_t expires_ns) {
    auto grant = std::make_shared<Grant>();
    grant->expires_ns = expires_ns;
    for (size_t i = 0; i < count; ++i) {
        if (records[i].state != 1) continue;
        region_.require(records[i].offset, records[i].length);
        grant->records.push_back(records[i]);
    }
    std::sort(grant->records.begin(), grant->records.end(),
              [](const Record& a, const Record& b) { return a.offset < b.offset; });
    const std::lock_guard<std::mutex> guard(grants_mutex_);
    if (grants_.size() >= forget_at_) forget_expired(now_ns());
    auto& entry = grants_[lock];
    if (entry) entry->revoked.store(true, std::memory_order_release);
    entry = std::move(grant);
}

void TcpServer::revoke(uint64_t lock) {
    const std::lock_guard<std::mutex> guard(grants_mutex_);
    const auto at = grants_.find(lock);
    if (at == grants_.end()) return;
    at->second->revoked.store(true, std::memory_order_release);
    grants_.erase(at);
}

// Grants whose reader died are never revoked. Called under grants_mutex_ when their number has doubled.
void TcpServer::forget_expired(uint64_t now) {
    for (auto at = grants_.begin(); at != grants_.end();) at = at->second->expires_ns <= now ? grants_.erase(at) : std::next(at);
    forget_at_ = std::max<size_t>(kForgetFrom, 2 * grants_.size());
}

std::shared_ptr<const Grant> TcpServer::grant_of(uint64_t lock) {
    const std::lock_guard<std::mutex> guard(grants_mutex_);
    const auto at = grants_.find(lock);
    return at == grants_.end() ? nullptr : at->second;
}

void TcpServer::run() {
    std::array<epoll_event, 64> events;
    uint64_t swept = now_ns();
    while (true) {
        const bool needs_clock = accept_paused_ || !connections_.empty();
        const int ready = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), needs_clock ? kSweepMs : -1);
        for (int i = 0; i < ready; ++i) {
            const int fd = events[static_cast<size_t>(i)].data.fd;
            if (fd == wake_.get()) return;
            if (fd == listener_.get())
                accept_all();
            else
                handle(fd, events[static_cast<size_t>(i)].events);
        }
        if (now_ns() - swept < static_cast<uint64_t>(kSweepMs) * 1000000ULL) continue;
        sweep();
        swept = now_ns();
    }
}

// False return values below mean: drop the connection.
void TcpServer::handle(int fd, uint32_t events) {
    const auto at = connections_.find(fd);
    if (at == connections_.end()) return;  // dropped by an earlier event of this batch
    Connection& connection = *at->second;
    bool keep = (events & (EPOLLERR | EPOLLHUP)) == 0;
    try {
        if (keep && (events & EPOLLIN) != 0) keep = receive(connection);
        if (keep && connection.watched == kBlockedEvents) keep = (events & EPOLLRDHUP) == 0 && send_some(connection);
    } catch (const std::exception&) {
        keep = false;  // out of memory: this connection ends, the others go on
    }
    if (!keep) drop(fd);
}

void TcpServer::accept_all() {
    while (true) {
        Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (!fd) {
            if (errno == EINTR || errno == ECONNABORTED) continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK) return;
            epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);  // out of descriptors: try again at the next sweep
            accept_paused_ = true;
            return;
        }
        if (connections_.size() >= max_connections_ && !make_room()) {
            ++stats_.connections_refused;
            continue;
        }
        tune(fd.get());
        const int key = fd.get();
        auto connection = std::make_unique<Connection>();
        connection->fd = std::move(fd);
        connection->progress_ns = now_ns();
        epoll_event event{};
        event.events = kIdleEvents;
        event.data.fd = key;
        if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, key, &event) != 0) continue;
        connections_[key] = std::move(connection);
        stats_.connections = connections_.size();
    }
}

bool TcpServer::make_room() {
    const uint64_t now = now_ns();
    int oldest = -1;
    uint64_t idle_ns = kIdleBeforeGivingWay;
    for (const auto& [fd, connection] : connections_) {
        if (!connection->idle() || now - connection->progress_ns < idle_ns) continue;
        idle_ns = now - connection->progress_ns;
        oldest = fd;
    }
    if (oldest >= 0) drop(oldest);
    return oldest >= 0;
}

void TcpServer::drop(int fd) {
    connections_.erase(fd);  // closing the descriptor takes it out of epoll
    stats_.connections = connections_.size();
}

void TcpServer::sweep() {
    const uint64_t now = now_ns();
    std::vector<int> late;
    for (const auto& [fd, connection] : connections_) {
        const uint64_t quiet = now - connection->progress_ns;
        const uint64_t patience = !connection->out.done()    ? kDrainPatience
                                  : !connection->greeted     ? kHelloPatience
                                  : connection->input.empty() ? UINT64_MAX
                                                              : kRequestPatience;
        if (quiet > patience) late.push_back(fd);
    }
    for (const int fd : late) drop(fd);
    if (!accept_paused_) return;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = listener_.get();
    accept_paused_ = epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event) != 0;
}

void TcpServer::watch(Connection& connection, uint32_t events) {
    if (connection.watched == events) return;
    epoll_event event{};
    event.events = events;
    event.data.fd = connection.fd.get();
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.fd.get(), &event);
    connection.watched = events;
}

bool TcpServer::receive(Connection& connection) {
    std::array<uint8_t, 16384> buffer;
    while (!connection.answering && connection.input.size() < kInputBytes) {
        const size_t room = std::min(buffer.size(), kInputBytes - connection.input.size());
        const ssize_t got = recv(connection.fd.get(), buffer.data(), room, 0);
        if (got == 0) return false;
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
        connection.progress_ns = now_ns();
        append(connection.input, buffer.data(), static_cast<size_t>(got));
        if (!parse(connection) || !send_some(connection)) return false;
    }
    return true;
}

bool TcpServer::refuse_protocol(Connection&) {
    ++stats_.protocol_errors;
    return false;
}

bool TcpServer::parse_hello(Connection& connection) {
    wire::Hello hello{};
    std::memcpy(&hello, connection.input.data(), std::min(sizeof hello, connection.input.size()));
    if (connection.input.size() >= sizeof hello.magic && hello.magic != wire::kHelloMagic) return refuse_protocol(connection);
    if (connection.input.size() < sizeof hello) return true;
    if (hello.version != wire::kVersion) {
        ++stats_.protocol_errors;
        connection.last_words = true;  // our hello tells the reader which version we speak
    }
    connection.greeted = true;
    connection.input.erase(connection.input.begin(), connection.input.begin() + sizeof hello);
    hello = {};
    hello.magic = wire::kHelloMagic;
    hello.version = wire::kVersion;
    hello.epoch = epoch_;
    hello.max_blocks = wire::kMaxRequestBlocks;
    connection.control.clear();
    append(connection.control, &hello, sizeof hello);
    connection.out.clear();
    connection.out.add(connection.control.data(), connection.control.size());
    return true;
}

// Turns input into the next thing to send, if a whole frame is there.
bool TcpServer::parse(Connection& connection) {
    if (!connection.out.done() || connection.answering) return true;
    if (!connection.greeted) return parse_hello(connection);
    wire::Request request{};
    std::memcpy(&request, connection.input.data(), std::min(sizeof request, connection.input.size()));
    if (connection.input.size() >= sizeof request.magic && request.magic != wire::kRequestMagic) return refuse_protocol(connection);
    if (connection.input.size() < sizeof request) return true;
    if (request.count == 0 || request.count > wire::kMaxRequestBlocks) return refuse_protocol(connection);
    const size_t bytes = sizeof request + request.count * sizeof(wire::SlotRef);
    if (connection.input.size() < bytes) return true;
    connection.refs.resize(request.count);
    std::memcpy(connection.refs.data(), connection.input.data() + sizeof request, bytes - sizeof request);
    connection.input.erase(connection.input.begin(), connection.input.begin() + static_cast<ptrdiff_t>(bytes));
    connection.request = request;
    connection.grant = grant_of(request.lock);
    connection.answering = true;
    connection.trailers_due = false;
    connection.first = connection.end = 0;
    return true;
}

Status TcpServer::admit(const Connection& connection, const wire::SlotRef& ref, uint64_t now, SlotHeader* header) const {
    if (connection.request.epoch != epoch_) return STALE;
    if (!connection.grant || !connection.grant->live(now)) return ABSENT;
    const Record* record = connection.grant->find(ref.offset);  // its range was checked when it was granted
    if (record == nullptr || record->length != ref.length) return ABSENT;
    if (record->generation != ref.generation) return STALE;
    const SlotHeader* slot = region_.slot(ref.offset);
    *header = snapshot(slot);
    if (header->generation != ref.generation || generation_after_copy(slot) != ref.generation) return STALE;
    return header->magic == kSlotMagic && header->length == ref.length ? OK : CORRUPT;
}

// All of the group's payload bytes are in the kernel: what do the slots say now?
void TcpServer::append_trailers(Connection& connection) {
    for (uint32_t position = connection.first; position < connection.end; ++position) {
        const size_t i = position - connection.first;
        if (connection.statuses[i] != OK) continue;
        const wire::Trailer trailer{generation_after_copy(region_.slot(connection.refs[position].offset)), position, 0};
        if (trailer.generation_after != connection.headers[i].generation) ++stats_.torn;
        append(connection.control, &trailer, sizeof trailer);
        stats_.bytes += connection.refs[position].length;
        ++stats_.blocks;
    }
    connection.trailers_due = false;
}

void TcpServer::begin_group(Connection& connection) {
    const uint32_t count = connection.request.count;
    connection.first = connection.end;
    connection.end = wire::group_end(connection.first, count, [&](uint32_t i) { return uint64_t{connection.refs[i].length}; });
    const uint32_t blocks = connection.end - connection.first;
    const wire::Group head{wire::kGroupMagic, connection.request.tag, connection.first, blocks};
    const uint64_t now = now_ns();
    uint32_t refused = 0;
    connection.statuses.fill(0);
    for (uint32_t i = 0; i < blocks; ++i) {
        connection.statuses[i] = admit(connection, connection.refs[connection.first + i], now, &connection.headers[i]);
        refused += connection.statuses[i] != OK;
    }
    append(connection.control, &head, sizeof head);
    append(connection.control, connection.statuses.data(), wire::padded_statuses(blocks));
    connection.out.add(connection.control.data(), connection.control.size());
    for (uint32_t i = 0; i < blocks; ++i) {
        if (connection.statuses[i] != OK) continue;
        const wire::SlotRef& ref = connection.refs[connection.first + i];
        connection.out.add(&connection.headers[i], sizeof(SlotHeader));
        connection.out.add(region_.payload(ref.offset), ref.length);
    }
    connection.trailers_due = true;
    stats_.refused += refused;
}

bool TcpServer::send_some(Connection& connection) {
    size_t sent = 0;
    while (true) {
        while (!connection.out.done()) {
            if (sent >= kTurnBytes) return watch(connection, kBlockedEvents), true;
            msghdr message{};
            message.msg_iov = connection.out.parts();
            message.msg_iovlen = std::min(connection.out.count(), kIovMax);
            const ssize_t n = sendmsg(connection.fd.get(), &message, MSG_NOSIGNAL);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return watch(connection, kBlockedEvents), true;
            if (n < 0) return false;
            connection.out.advance(static_cast<size_t>(n));
            connection.progress_ns = now_ns();
            sent += static_cast<size_t>(n);
        }
        if (connection.last_words) return false;
        if (connection.answering) {
            connection.out.clear();
            connection.control.clear();
            const bool more = connection.end < connection.request.count;
            if (connection.trailers_due) append_trailers(connection);
            if (more) {
                begin_group(connection);
                continue;
            }
            connection.out.add(connection.control.data(), connection.control.size());
            if (!connection.out.done()) continue;
            connection.answering = false;
            connection.grant.reset();
            ++stats_.reads;
        }
        if (!parse(connection)) return false;
        if (connection.out.done() && !connection.answering) return watch(connection, kIdleEvents), true;
    }
}

}  // namespace kvdir
