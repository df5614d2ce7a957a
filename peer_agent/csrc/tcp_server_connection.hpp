// State of one accepted connection of the tcp server: what has been received, and the answer under way.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "tcp_server.hpp"

namespace kvdir {

constexpr uint32_t kIdleEvents = EPOLLIN | EPOLLRDHUP;
constexpr uint32_t kBlockedEvents = EPOLLOUT | EPOLLRDHUP;

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

}  // namespace kvdir
