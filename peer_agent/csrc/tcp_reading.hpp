// One read of the tcp plane as a state machine: who runs it never waits in it.
//
//   begin() -> READ   -> advance() -> READ, TURN   -> advance() -> ... -> NOTHING: every block has its status
//   sends the            receives what is there,                       or end(LATE | PEER_LOST) between any two calls
//   request              verifies whole groups
//
// Rules
// - The peer is trusted in nothing: frames are compared with what was asked, payload lengths are ours, every header is
//   verified against record, fingerprint and namespace, and the checksum runs over the bytes as they lie in our slot.
// - One thread at a time, not always the same. It has its client's connection until it is destroyed.
// - Once it is done nothing writes to the destinations. If it ended by anything but a whole answer, the connection is broken.
// - Memory: at most kReadingBytes and kReadingBytesPerBlock for each block asked for, whatever the peer sends.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "hash.hpp"
#include "tcp_client.hpp"

namespace kvdir {

constexpr size_t kReadingBytes = 64 << 10;
constexpr size_t kReadingBytesPerBlock = 256;

class TcpReading {
  public:
    // By TcpClient, which has marked itself busy.
    TcpReading(TcpClient& client, const ReadJob& job, uint8_t* statuses);
    ~TcpReading();
    TcpReading(const TcpReading&) = delete;
    TcpReading& operator=(const TcpReading&) = delete;

    // Sends as much of the request as goes without waiting. What goes wrong here shows itself in `advance`.
    Need begin();
    // Receives what is there, at most kTurnBytes. NOTHING: done.
    Need advance();
    // Done now, with `status` for the blocks that have no verdict. Nothing happens when it is done already.
    void end(Status status);

  private:
    static constexpr uint32_t kControl = UINT32_MAX;
    static constexpr size_t kPartsMax = 2 * wire::kGroupBlocks + 2;  // of one group with its trailers and the next head

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
    void plan_groups();
    void write_requests();
    void append(const void* data, size_t bytes);

    Need receive();
    bool next_group();
    Segment head_segment(size_t g);
    bool begin_group(const Planned& plan, const Head& head);
    bool end_group(const Planned& plan, const Head& head);
    Status decide(uint32_t asked, uint32_t i, const wire::Trailer& trailer) const;
    Moved receive_some();
    void take(size_t bytes);
    void hash_part(const Segment& segment, size_t part);
    void fill_rest(Status status);

    TcpClient& client_;
    const ReadJob job_;
    uint8_t* const statuses_;
    const uint64_t kEmptyChecksum = hash64(nullptr, 0);

    std::vector<uint32_t> asked_;  // positions in the job that travel
    std::vector<Planned> groups_;
    std::vector<uint8_t> requests_;
    IoList outgoing_;
    bool sent_ = false, done_ = false;

    size_t heads_taken_ = 0;  // groups whose head has been looked at; the last of them is under way
    std::vector<Segment> segments_;
    size_t at_ = 0;  // first segment that is not full
    size_t trailers_ = 0;
    std::array<Head, 2> heads_{};
    std::array<SlotHeader, wire::kGroupBlocks> headers_{};
    std::array<wire::Trailer, wire::kGroupBlocks> trailer_{};
    std::array<uint64_t, wire::kGroupBlocks> checksums_{};
    PieceHash hash_;
};

}  // namespace kvdir
