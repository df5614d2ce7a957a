// One UCX worker: our memory served to peers, links to theirs, batches of gets. No Python in here; one thread only.
//
//   reader                                                          owner
//     | ucp_ep_create by worker address ------------------------->    |
//     | Hello: wanted incarnation, token  (active message 1) ---->    |  is it mine?
//     | <---- Welcome: token, yes or no, where its memory is (2) -    |
//     | ucp_get_nbx x n ----------------------------------------->  memory
//
// The token is the link's number, random: whoever else can reach our worker cannot answer for the owner.
//
// Why the hello: a worker address and a remote key name a process's memory by numbers that a later process may use otherwise. Gets
// that UCX emulates are answered by code that checks nothing, so a get from a dead process's address ends its successor
// (SIGSEGV, measured). The incarnation is asked for before the first get, over the very endpoint that the gets will use, and where
// the served memory lies is taken from that answer only, never from a descriptor.
//
// Invariants
// - A batch is reported (Event) exactly once, after its last request has completed: then UCX writes nothing of it any more.
// - No get is posted on an endpoint that has failed (UCX 1.22 dereferences what is gone), nor before Welcome, nor one that would
//   leave the memory that Welcome named.
// - A link goes when its endpoint is closed and its last batch has been reported; its remote key goes with it.
// - Callbacks of UCX only change numbers and queue events; nothing is called from them that could progress the worker.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ucp_api.hpp"

namespace kvdir::ucx {

using Incarnation = std::array<uint8_t, 16>;

// What has come to an end. status: 0, or why not (Worker::reason).
struct Event {
    uint64_t ticket;
    int64_t status;
};

struct Get {
    uint64_t to;     // address here
    uint64_t from;   // offset in the memory that the peer serves
    uint64_t bytes;
};

struct Lane {
    std::string transport, device;
};

class Worker {
  public:
    // settings: of UCX, names without UCX_. Throws std::runtime_error.
    Worker(const Api& api, const std::vector<std::pair<std::string, std::string>>& settings, const Incarnation& incarnation);
    ~Worker();
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    int event_fd() const { return event_fd_; }
    std::string address() const;
    std::string reason(int64_t status) const;

    // Registers memory for gets into it; with `serve`, which comes once, for peers' gets from it as well: the remote key is
    // returned. Throws std::runtime_error.
    std::string map(void* base, size_t bytes, bool serve);

    // Moves things along for at most budget_ns. True: nothing more to do until event_fd is readable. False: call again soon.
    bool progress(uint64_t budget_ns);
    std::vector<Event> take_events() { return std::exchange(events_, {}); }

    // A new link, identified by the number returned; reported under `ticket` once the peer has welcomed us, or cannot. Throws
    // std::invalid_argument (garbage) or std::runtime_error.
    uint64_t connect(const std::string& address, const std::string& key, const Incarnation& incarnation, uint64_t ticket);

    // Posts all gets; reported under `ticket`. Throws std::invalid_argument, having posted nothing, for memory of ours that is
    // not mapped or beyond what the peer serves.
    void get(uint64_t link, const std::vector<Get>& gets, uint64_t ticket);

    // Ends a link; gets under way are reported as failed. Reported under `ticket` when nothing of it is left.
    void close(uint64_t link, uint64_t ticket);

    bool failed(uint64_t link) const;
    std::vector<Lane> lanes(uint64_t link) const;

  private:
    struct Batch;
    struct Link;
    struct Mapped {
        uint64_t begin, end;
        MemoryHandle handle;
    };

    static void on_get(void* request, Status status, void* batch);
    static void on_closed(void* request, Status status, void* link);
    static void on_sent(void* request, Status status, void* self);
    static void on_failed(void* link, Endpoint, Status status);
    static Status on_hello(void* self, const void* header, size_t bytes, void*, size_t, const MessageParams*);
    static Status on_welcome(void* self, const void* header, size_t bytes, void*, size_t, const MessageParams*);

    void start(const std::vector<std::pair<std::string, std::string>>& settings);
    void stop();
    void handle_messages(unsigned id, Status (*callback)(void*, const void*, size_t, void*, size_t, const MessageParams*));
    void send(Endpoint to, unsigned id, const void* header, size_t bytes, uint32_t flags);
    void report(uint64_t ticket, int64_t status) { events_.push_back({ticket, status}); }
    void finish(Batch* batch);
    void settle(Link* link);
    void require(Status status, const char* what) const;
    MemoryHandle memory_of(const std::vector<Get>& gets) const;
    std::string key_of(MemoryHandle memory) const;

    const Api& api_;
    const Incarnation incarnation_;
    Context context_ = nullptr;
    WorkerHandle worker_ = nullptr;
    int event_fd_ = -1;
    std::vector<Mapped> mapped_;
    uint64_t served_base_ = 0, served_bytes_ = 0;
    std::unordered_map<uint64_t, std::unique_ptr<Link>> links_;
    std::vector<Event> events_;
};

}  // namespace kvdir::ucx
