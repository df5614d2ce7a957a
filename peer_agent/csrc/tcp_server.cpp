#include "tcp_server.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <stdexcept>

#include "clock.hpp"
#include "movers.hpp"
#include "tcp_server_connection.hpp"

namespace kvdir {

Grant::Grant(const Region& region, const wire::Capability& capability, const Record* records, size_t count)
    : capability_(capability) {
    for (size_t i = 0; i < count; ++i) {
        if (records[i].state != 1) continue;
        region.require(records[i].offset, records[i].length);
        records_.push_back(records[i]);
    }
    while ((size_t{1} << (64 - shift_)) < 2 * records_.size()) --shift_;
    table_.resize(size_t{1} << (64 - shift_));
    for (uint32_t i = 0; i < records_.size(); ++i) {
        size_t at = first_place(records_[i].offset);
        while (table_[at] != 0) at = next_place(at);
        table_[at] = i + 1;
    }
}

const Record* Grant::find(uint64_t offset) const {
    for (size_t at = first_place(offset); table_[at] != 0; at = next_place(at))
        if (records_[table_[at] - 1].offset == offset) return &records_[table_[at] - 1];
    return nullptr;
}

bool Grant::shown(const wire::Capability& capability) const {
    const auto* theirs = reinterpret_cast<const uint8_t*>(&capability);
    const auto* ours = reinterpret_cast<const uint8_t*>(&capability_);
    volatile uint8_t difference = 0;  // volatile: the loop must not end early
    for (size_t i = 0; i < sizeof capability; ++i) difference = difference | (theirs[i] ^ ours[i]);
    return difference == 0;
}

TcpServer::TcpServer(Region region, uint64_t epoch, const std::string& host, uint16_t port, size_t max_connections,
                     Patience patience, MakeStream make)
    : region_(std::move(region)), epoch_(epoch), max_connections_(max_connections), patience_(patience), make_(std::move(make)) {
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
    for (Fd* fd : {&listener_, &epoll_, &wake_}) fd->reset();
    stats_.connections = 0;
}

void TcpServer::grant(const wire::Capability& capability, const Record* records, size_t count) {
    if (capability.version != wire::kCapabilityVersion || capability.epoch != epoch_)
        throw std::invalid_argument("the capability is of another epoch or version");
    // A region of now: the owner may have added size classes since.
    auto grant = std::make_shared<Grant>(Region(region_.base(), region_.bytes()), capability, records, count);
    const std::lock_guard<std::mutex> guard(grants_mutex_);
    if (grants_.size() >= forget_at_) forget_expired(now_ns());
    auto& entry = grants_[capability.lock];
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
    for (auto at = grants_.begin(); at != grants_.end();) at = at->second->expired(now) ? grants_.erase(at) : std::next(at);
    forget_at_ = std::max<size_t>(kForgetFrom, 2 * grants_.size());
}

std::shared_ptr<const Grant> TcpServer::grant_of(uint64_t lock) {
    const std::lock_guard<std::mutex> guard(grants_mutex_);
    const auto at = grants_.find(lock);
    return at == grants_.end() ? nullptr : at->second;
}

void TcpServer::run() {
    std::array<epoll_event, 64> events;
    std::vector<int> again;
    uint64_t swept = now_ns();
    while (true) {
        const bool needs_clock = accept_paused_ || !connections_.empty();
        const int timeout_ms = !again_.empty() ? 0 : needs_clock ? patience_.sweep_ms : -1;
        const int ready = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
        again.clear();
        again.swap(again_);
        bool accepts = false;
        for (int i = 0; i < ready; ++i) {
            const int fd = events[static_cast<size_t>(i)].data.fd;
            if (fd == wake_.get()) return;
            if (fd == listener_.get())
                accepts = true;
            else
                handle(fd, events[static_cast<size_t>(i)].events);
        }
        for (const int fd : again) {
            const auto at = connections_.find(fd);
            if (at != connections_.end()) at->second->again = false;
            handle(fd, 0);
        }
        // Last: an event or a turn of a connection that has been dropped must not meet a new one with its descriptor.
        if (accepts) accept_all();
        if (now_ns() - swept < static_cast<uint64_t>(patience_.sweep_ms) * 1000000ULL) continue;
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
    // A peer that half-closes while it does not take its answer has left.
    if ((events & EPOLLRDHUP) != 0 && !connection.out.done()) keep = false;
    try {
        keep = keep && move(connection);
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
        connection->progress_ns = now_ns();
        try {
            connection->stream = make_(std::move(fd));
        } catch (const std::exception&) {
            ++stats_.connections_refused;
            continue;
        }
        epoll_event event{};
        event.events = connection->watched;
        event.data.fd = key;
        if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, key, &event) != 0) continue;
        connections_[key] = std::move(connection);
        stats_.connections = connections_.size();
    }
}

bool TcpServer::make_room() {
    const uint64_t now = now_ns();
    int shy = -1, idle = -1;
    uint64_t shy_ns = patience_.shy, idle_ns = patience_.idle;
    for (const auto& [fd, connection] : connections_) {
        const uint64_t quiet = now - connection->progress_ns;
        if (!connection->greeted && quiet >= shy_ns) shy_ns = quiet, shy = fd;
        if (connection->idle() && quiet >= idle_ns) idle_ns = quiet, idle = fd;
    }
    const int leaves = shy >= 0 ? shy : idle;
    if (leaves >= 0) drop(leaves);
    return leaves >= 0;
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
        const uint64_t patience = !connection->out.done()    ? patience_.drain
                                  : !connection->greeted     ? patience_.hello
                                  : connection->input.empty() ? UINT64_MAX
                                                              : patience_.request;
        if (quiet > patience) late.push_back(fd);
    }
    for (const int fd : late) drop(fd);
    if (!accept_paused_) return;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = listener_.get();
    accept_paused_ = epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event) != 0;
}

void TcpServer::end_turn(Connection& connection) {
    if (std::exchange(connection.again, true)) return;
    again_.push_back(connection.stream->fd());
}

void TcpServer::watch(Connection& connection, Io wanted) {
    const uint32_t events = (wanted == Io::WANT_WRITE ? EPOLLOUT : EPOLLIN) | EPOLLRDHUP;
    if (connection.watched == events) return;
    epoll_event event{};
    event.events = events;
    event.data.fd = connection.stream->fd();
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.stream->fd(), &event);
    connection.watched = events;
}

}  // namespace kvdir
