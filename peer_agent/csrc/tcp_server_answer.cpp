// The protocol half of the tcp server: frames in, groups out. The other half, sockets and time, is tcp_server.cpp.
// Functions that return false mean: drop the connection.
#include <algorithm>
#include <array>
#include <cstring>

#include "clock.hpp"
#include "tcp_server.hpp"
#include "tcp_server_connection.hpp"

namespace kvdir {
namespace {

constexpr size_t kTurnBytes = 4 << 20;  // sent and received before other connections get a turn
constexpr size_t kCallBytes = 128 << 10;  // what a call of the stream counts beside what it moved: tiny requests are work, too
constexpr size_t kInputBytes = sizeof(wire::Request) + wire::kMaxRequestBlocks * sizeof(wire::SlotRef);

void append(std::vector<uint8_t>& buffer, const void* data, size_t bytes) {
    const auto* from = static_cast<const uint8_t*>(data);
    buffer.insert(buffer.end(), from, from + bytes);
}

}  // namespace

// Goes on with whatever the connection is at until it has to wait or its turn is over.
bool TcpServer::move(Connection& connection) {
    if (!connection.secured) {
        const Io io = connection.stream->handshake();
        if (io == Io::CLOSED) return refuse_protocol();
        if (io != Io::MOVED) return watch(connection, io), true;
        connection.secured = true;
        connection.progress_ns = now_ns();
    }
    size_t budget = kTurnBytes;
    while (true) {
        if (!send_some(connection, &budget)) return false;
        if (!connection.out.done()) return true;
        const Moved got = receive_some(connection);
        if (got.io == Io::CLOSED) return false;
        if (got.io != Io::MOVED) return watch(connection, got.io), true;
        if (!parse(connection)) return false;
        budget -= std::min(budget, kCallBytes + got.bytes);
        if (budget == 0) return end_turn(connection), true;
    }
}

// Nothing is left to send and no whole frame to answer, so there is room.
Moved TcpServer::receive_some(Connection& connection) {
    std::array<uint8_t, 16384> buffer;
    const iovec room{buffer.data(), std::min(buffer.size(), kInputBytes - connection.input.size())};
    const Moved got = connection.stream->readv(&room, 1);
    if (got.io != Io::MOVED) return got;
    if (connection.greeted && connection.input.empty()) connection.progress_ns = now_ns();  // a frame begins
    append(connection.input, buffer.data(), got.bytes);
    return got;
}

bool TcpServer::refuse_protocol() {
    ++stats_.protocol_errors;
    return false;
}

bool TcpServer::parse_hello(Connection& connection) {
    wire::Hello hello{};
    std::memcpy(&hello, connection.input.data(), std::min(sizeof hello, connection.input.size()));
    if (connection.input.size() < sizeof hello.magic) return true;
    const bool tls = wire::looks_like_tls(connection.input.data());
    if (hello.magic != wire::kHelloMagic && !tls) return refuse_protocol();
    if (connection.input.size() < sizeof hello && !tls) return true;
    if (tls || hello.version != wire::kVersion) {
        ++stats_.protocol_errors;
        connection.last_words = true;  // our hello tells the reader what is spoken here: which version, and no TLS
    }
    connection.greeted = true;
    connection.input.erase(connection.input.begin(),
                           connection.input.begin() + static_cast<ptrdiff_t>(std::min(sizeof hello, connection.input.size())));
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
    if (!connection.out.done() || connection.answering || connection.input.empty()) return true;
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
    judge(connection, now_ns());
    connection.answering = true;
    connection.trailers_due = false;
    connection.first = connection.end = 0;
    return true;
}

void TcpServer::refuse(Connection& connection, Refusal why) {
    connection.refusal = why;
    connection.grant.reset();
    ++stats_.requests[static_cast<size_t>(why)];
}

// Finds the grant that the request may be served under, or why there is none. Cheap checks first; none of what they look at is
// a secret, and the answer is the same for all but EPOCH, which our hello has told.
void TcpServer::judge(Connection& connection, uint64_t now) {
    const wire::Capability& shown = connection.request.capability;
    connection.grant.reset();
    connection.refusal = Refusal::NONE;
    if (shown.version != wire::kCapabilityVersion) return refuse(connection, Refusal::MALFORMED);
    if (shown.epoch != epoch_) return refuse(connection, Refusal::EPOCH);
    auto grant = grant_of(shown.lock);
    if (!grant) return refuse(connection, now >= shown.expires_ns ? Refusal::EXPIRED : Refusal::ENDED);
    if (!grant->shown(shown)) return refuse(connection, Refusal::FORGED);
    connection.grant = std::move(grant);
}

// A group begins: what was granted when the request came may have ended since.
void TcpServer::recheck(Connection& connection, uint64_t now) {
    if (!connection.grant) return;
    if (connection.grant->expired(now)) return refuse(connection, Refusal::EXPIRED);
    if (connection.grant->revoked.load(std::memory_order_acquire)) refuse(connection, Refusal::ENDED);
}

Status TcpServer::admit(const Connection& connection, const wire::SlotRef& ref) {
    if (connection.refusal == Refusal::EPOCH) return STALE;
    if (!connection.grant) return ABSENT;
    const Record* record = connection.grant->find(ref.offset);  // its range was checked when it was granted
    if (record == nullptr || record->length != ref.length) return ++stats_.uncovered, ABSENT;
    if (record->generation != ref.generation) return STALE;
    const SlotHeader* slot = region_.slot(ref.offset);
    if (load_generation(slot) != ref.generation) return STALE;
    const bool sound = slot->magic == kSlotMagic && slot->length == ref.length;
    if (generation_after_copy(slot) != ref.generation) return STALE;
    return sound ? OK : CORRUPT;
}

// The stream has a copy of all of the group's bytes (stream.hpp): what do the slots say now?
void TcpServer::append_trailers(Connection& connection) {
    for (uint32_t position = connection.first; position < connection.end; ++position) {
        if (connection.statuses[position - connection.first] != OK) continue;
        const wire::SlotRef& ref = connection.refs[position];
        const wire::Trailer trailer{generation_after_copy(region_.slot(ref.offset)), position, 0};
        if (trailer.generation_after != ref.generation) ++stats_.torn;
        append(connection.control, &trailer, sizeof trailer);
        stats_.bytes += ref.length;
        ++stats_.blocks;
    }
    connection.trailers_due = false;
}

void TcpServer::begin_group(Connection& connection) {
    const uint32_t count = connection.request.count;
    connection.first = connection.end;
    connection.end = wire::group_end(connection.first, count, [&](uint32_t i) { return uint64_t{connection.refs[i].length}; });
    const uint32_t blocks = connection.end - connection.first;
    const wire::SlotRef* refs = connection.refs.data() + connection.first;
    // Every header is a cache miss; together they cost little more than one.
    for (uint32_t i = 0; i < blocks; ++i)
        if (in_range(refs[i].offset, 0, region_.bytes())) __builtin_prefetch(region_.slot(refs[i].offset));
    const wire::Group head{wire::kGroupMagic, connection.request.tag, connection.first, blocks};
    recheck(connection, now_ns());
    uint32_t refused = 0;
    connection.statuses.fill(0);
    for (uint32_t i = 0; i < blocks; ++i) {
        connection.statuses[i] = admit(connection, refs[i]);
        refused += connection.statuses[i] != OK;
    }
    append(connection.control, &head, sizeof head);
    append(connection.control, connection.statuses.data(), wire::padded_statuses(blocks));
    connection.out.add(connection.control.data(), connection.control.size());
    for (uint32_t i = 0; i < blocks; ++i)
        if (connection.statuses[i] == OK) connection.out.add(region_.slot(refs[i].offset), kHeaderBytes + refs[i].length);
    connection.trailers_due = true;
    stats_.refused += refused;
}

// Sends the answer under way, and those to further requests that have arrived.
bool TcpServer::send_some(Connection& connection, size_t* budget) {
    while (true) {
        while (!connection.out.done()) {
            if (*budget == 0) return end_turn(connection), true;
            const Moved moved = connection.stream->writev(connection.out.parts(), connection.out.count());
            if (moved.io == Io::CLOSED) return false;
            if (moved.io != Io::MOVED) return watch(connection, moved.io), true;
            connection.out.advance(moved.bytes);
            connection.progress_ns = now_ns();
            *budget -= std::min(*budget, kCallBytes + moved.bytes);
        }
        if (connection.last_words) return false;
        if (connection.answering) next_part(connection);
        if (!connection.out.done()) continue;
        if (!parse(connection)) return false;
        if (connection.out.done() && !connection.answering) return true;
    }
}

// Puts into `out` what comes behind the part that has been sent: trailers, the next group, or nothing more.
void TcpServer::next_part(Connection& connection) {
    connection.out.clear();
    connection.control.clear();
    const bool more = connection.end < connection.request.count;
    if (connection.trailers_due) append_trailers(connection);
    if (more) return begin_group(connection);
    connection.out.add(connection.control.data(), connection.control.size());
    if (!connection.out.done()) return;
    connection.answering = false;
    connection.grant.reset();
    ++stats_.reads;
}

}  // namespace kvdir
