// Owner's side of the tcp plane: one native thread that answers granted reads straight from the arena.
//
// Rules
// - Only slots that a live grant names are served, to who shows that grant's capability, at the generation and length that it
//   names; anything else is a status. Capabilities are made outside (peer_agent/core/capability.py); here they are compared,
//   whole and in constant time, with that of the grant.
// - One epoll thread, non-blocking sockets. A slow reader holds its own socket buffer and nothing else; memory per
//   connection is bounded (one request of kMaxRequestBlocks refs, received and parsed); a turn moves at most kTurnBytes.
// - A connection that does not finish its handshake, its hello or a request in time, byte by byte or not at all, or does not
//   drain its answer is closed. When max_connections are open, the one that has said nothing for longest since it came gives
//   way, else the one idle for longest, if there is any.
// - grant, revoke and stats may come from any thread; no lock is held while bytes move.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "net.hpp"
#include "slot.hpp"
#include "stream.hpp"
#include "wire.hpp"

namespace kvdir {

// The slots that may be read with one capability until it expires. Immutable but for `revoked`.
class Grant {
  public:
    // Absent records are left out. std::invalid_argument if one is not a slot of the region.
    Grant(const Region& region, const wire::Capability& capability, const Record* records, size_t count);

    const Record* find(uint64_t offset) const;
    // Every byte is looked at, whatever is found.
    bool shown(const wire::Capability& capability) const;
    bool expired(uint64_t now) const { return now >= capability_.expires_ns; }

    std::atomic<bool> revoked{false};

  private:
    size_t first_place(uint64_t offset) const { return (offset * 0x9E3779B97F4A7C15ULL) >> shift_; }
    size_t next_place(size_t at) const { return (at + 1) & (table_.size() - 1); }

    const wire::Capability capability_;
    std::vector<Record> records_;
    // Open addressing by offset, a power of two and at most half full: positions in records_ plus one, 0 where nothing is.
    std::vector<uint32_t> table_;
    unsigned shift_ = 63;
};

// Why a request is served nothing.
enum class Refusal : uint8_t {
    NONE,
    MALFORMED,  // no capability of this version
    EPOCH,      // of another life of an agent
    EXPIRED,    // its time has passed
    ENDED,      // of a lock that was ended early, or never was
    FORGED,     // of a live lock, and not what was given for it
};
constexpr size_t kRefusals = 6;

struct ServerStats {
    std::atomic<uint64_t> connections{0}, reads{0}, blocks{0}, bytes{0}, refused{0}, torn{0}, protocol_errors{0};
    std::atomic<uint64_t> connections_refused{0};
    std::atomic<uint64_t> uncovered{0};                       // blocks that the capability does not cover
    std::array<std::atomic<uint64_t>, kRefusals> requests{};  // by Refusal
};

// The most that one connection makes the owner allocate, whatever is sent on it, socket buffers and TLS aside: a request that is
// being received (its buffer twice while it grows), one that is being answered, and one group of the answer.
constexpr size_t kConnectionBytes = 512 << 10;

// How long a connection may take, nanoseconds. Looked at every `sweep_ms`.
struct Patience {
    uint64_t hello = 5000000000ULL;     // connected, has not finished the handshake and said hello
    uint64_t request = 10000000000ULL;  // has begun a request and not finished it
    uint64_t drain = 30000000000ULL;    // does not take its answer
    uint64_t idle = 10000000000ULL;     // with nothing to do, before it may have to give way to a new one
    int sweep_ms = 1000;
    uint64_t shy = 1000000000ULL;  // connected and no hello yet, before it may have to give way to a new one
};

class TcpServer {
  public:
    // The region must stay mapped until close. Throws std::runtime_error when it cannot listen.
    TcpServer(Region region, uint64_t epoch, const std::string& host, uint16_t port, size_t max_connections,
              Patience patience = {}, MakeStream make = plain_stream);
    ~TcpServer();

    uint16_t port() const { return port_; }
    // Replaces an earlier grant of its lock. std::invalid_argument as Grant says, and for a capability that is not of this epoch.
    void grant(const wire::Capability& capability, const Record* records, size_t count);
    void revoke(uint64_t lock);
    const ServerStats& stats() const { return stats_; }
    void close();

  private:
    struct Connection;
    using Connections = std::unordered_map<int, std::unique_ptr<Connection>>;

    void run();
    void handle(int fd, uint32_t events);
    void accept_all();
    bool make_room();
    void drop(int fd);
    void sweep();
    void watch(Connection& connection, Io wanted);
    void end_turn(Connection& connection);

    bool move(Connection& connection);
    Moved receive_some(Connection& connection);
    bool parse(Connection& connection);
    bool parse_hello(Connection& connection);
    bool send_some(Connection& connection, size_t* budget);
    void next_part(Connection& connection);
    void begin_group(Connection& connection);
    void append_trailers(Connection& connection);
    Status admit(const Connection& connection, const wire::SlotRef& ref);
    void judge(Connection& connection, uint64_t now);
    void recheck(Connection& connection, uint64_t now);
    void refuse(Connection& connection, Refusal why);
    bool refuse_protocol();
    std::shared_ptr<const Grant> grant_of(uint64_t lock);
    void forget_expired(uint64_t now);

    const Region region_;
    const uint64_t epoch_;
    const size_t max_connections_;
    const Patience patience_;
    const MakeStream make_;
    uint16_t port_ = 0;
    Fd listener_, epoll_, wake_;
    bool accept_paused_ = false;
    Connections connections_;
    std::vector<int> again_;  // connections whose turn ended before they had to wait, each once
    ServerStats stats_;

    static constexpr size_t kForgetFrom = 64;
    std::mutex grants_mutex_;  // guards the two below only
    std::unordered_map<uint64_t, std::shared_ptr<Grant>> grants_;
    size_t forget_at_ = kForgetFrom;

    std::mutex close_mutex_;  // so that concurrent closes join once
    std::thread thread_;
};

}  // namespace kvdir
