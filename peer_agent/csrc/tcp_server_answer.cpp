// The protocol half of the tcp server: frames in, groups out. The other half, sockets and time, is tcp_server.cpp.
// Functions that return false mean: drop the connection.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "clock.hpp"
#include "tcp_server.hpp"
#include "tcp_server_connection.hpp"

namespace kvdir {
namespace {

constexpr size_t kTurnBytes = 4 << 20;
constexpr size_t kInputBytes = sizeof(wire::Request) + wire::kMaxRequestBlocks * sizeof(wire::SlotRef);
constexpr size_t kIovMax = 1024;

void append(std::vector<uint8_t>& buffer, const void* data, size_t bytes) {
    const auto* from = static_cast<const uint8_t*>(data);
    buffer.insert(buffer.end(), from, from + bytes);
}

}  // namespace

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

bool TcpServer::refuse_protocol() {
    ++stats_.protocol_errors;
    return false;
}

bool TcpServer::parse_hello(Connection& connection) {
    wire::Hello hello{};
    std::memcpy(&hello, connection.input.data(), std::min(sizeof hello, connection.input.size()));
    if (connection.input.size() >= sizeof hello.magic && hello.magic != wire::kHelloMagic) return refuse_protocol();
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
    if (connection.input.size() >= sizeof request.magic && request.magic != wire::kRequestMagic) return refuse_protocol();
    if (connection.input.size() < sizeof request) return true;
    if (request.count == 0 || request.count > wire::kMaxRequestBlocks) return refuse_protocol();
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
