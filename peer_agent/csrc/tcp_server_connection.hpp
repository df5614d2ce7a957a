// State of one accepted connection of the tcp server: what has been received, and the answer under way.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "stream.hpp"
#include "tcp_server.hpp"

namespace kvdir {

struct TcpServer::Connection {
    std::unique_ptr<Stream> stream;
    uint32_t watched = EPOLLIN | EPOLLRDHUP;
    bool again = false;        // listed in again_
    bool secured = false;      // the stream's handshake is done
    uint64_t progress_ns = 0;  // accepted, secured, a frame began, or bytes were sent
    bool greeted = false;
    bool last_words = false;      // close once `out` is sent
    std::vector<uint8_t> input;   // at most kInputBytes
    IoList out;                   // points into `control` and the arena
    std::vector<uint8_t> control;

    // The answer under way. Positions below `first` are done, [first, end) is the group in `out`.
    bool answering = false;
    bool trailers_due = false;
    wire::Request request{};
    std::vector<wire::SlotRef> refs;
    std::shared_ptr<const Grant> grant;  // null when refusal says why
    Refusal refusal = Refusal::NONE;
    uint32_t first = 0, end = 0;
    std::array<uint8_t, wire::kGroupBlocks> statuses{};

    bool idle() const { return greeted && !answering && input.empty() && out.done(); }
};

}  // namespace kvdir
