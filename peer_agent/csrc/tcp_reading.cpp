#include "tcp_reading.hpp"

#include <algorithm>

#include "clock.hpp"

namespace kvdir {
namespace {

// One call receives at most this much, so that it is hashed while still in the cache.
constexpr size_t kReceiveBytes = 256 << 10;
// Received before other reads get a turn.
constexpr size_t kTurnBytes = 4 << 20;

}  // namespace

TcpReading::TcpReading(TcpClient& client, const ReadJob& job, uint8_t* statuses)
    : client_(client), job_(job), statuses_(statuses) {
    asked_.reserve(job.blocks.count);
    for (uint32_t i = 0; i < job.blocks.count; ++i) {
        statuses_[i] = job.records[i].state != 1 ? ABSENT : job.destinations[i] == nullptr ? CORRUPT : PEER_LOST;
        if (statuses_[i] == PEER_LOST) asked_.push_back(i);
    }
    plan_groups();
}

TcpReading::~TcpReading() {
    end(PEER_LOST);
    client_.end_turn();
}

Need TcpReading::begin() {
    if (groups_.empty() || client_.broken() || job_.epoch != client_.epoch_ || expired(job_.deadline_ns)) return Need::TURN;
    write_requests();
    segments_.push_back(head_segment(0));
    sent_ = true;
    return write_list(*client_.stream_, outgoing_) == Io::MOVED ? Need::READ : Need::READ_OR_WRITE;
}

Need TcpReading::advance() {
    if (done_) return Need::NOTHING;
    if (!sent_) {  // nothing was asked, so the connection stays as good as it is
        fill_rest(client_.broken() ? PEER_LOST : job_.epoch != client_.epoch_ ? STALE : LATE);
        done_ = true;
        return Need::NOTHING;
    }
    return receive();
}

void TcpReading::end(Status status) {
    if (done_) return;
    done_ = true;
    fill_rest(status);
    if (sent_) client_.give_up();
}

// Blocks that were asked for and have no verdict.
void TcpReading::fill_rest(Status status) {
    for (const uint32_t i : asked_)
        if (statuses_[i] == PEER_LOST) statuses_[i] = status;
}

// The requests and, by the rule of wire.hpp, the groups in which the owner will answer them.
void TcpReading::plan_groups() {
    const auto total = static_cast<uint32_t>(asked_.size());
    for (uint32_t begin = 0, tag = 1; begin < total; begin += wire::kMaxRequestBlocks, ++tag) {
        const uint32_t count = std::min(wire::kMaxRequestBlocks, total - begin);
        for (uint32_t first = 0; first < count;) {
            const uint32_t end = wire::group_end(first, count, [&](uint32_t i) { return uint64_t{record(begin + i).length}; });
            groups_.push_back({tag, first, end - first, begin + first});
            first = end;
        }
    }
}

void TcpReading::write_requests() {
    const auto total = static_cast<uint32_t>(asked_.size());
    requests_.reserve((total / wire::kMaxRequestBlocks + 1) * sizeof(wire::Request) + total * sizeof(wire::SlotRef));
    for (uint32_t begin = 0, tag = 1; begin < total; begin += wire::kMaxRequestBlocks, ++tag) {
        const uint32_t count = std::min(wire::kMaxRequestBlocks, total - begin);
        const wire::Request request{wire::kRequestMagic, count, tag, 0, job_.capability};
        append(&request, sizeof request);
        for (uint32_t i = begin; i < begin + count; ++i) {
            const wire::SlotRef ref{record(i).offset, record(i).generation, record(i).length, 0};
            append(&ref, sizeof ref);
        }
    }
    outgoing_.add(requests_.data(), requests_.size());
}

void TcpReading::append(const void* data, size_t bytes) {
    const auto* from = static_cast<const uint8_t*>(data);
    requests_.insert(requests_.end(), from, from + bytes);
}

// Receives until nothing is there, sending what is left of the requests whenever that is so.
Need TcpReading::receive() {
    for (size_t received = 0; received < kTurnBytes;) {
        if (at_ == segments_.size()) {
            if (!next_group()) return end(PEER_LOST), Need::NOTHING;
            if (done_) return Need::NOTHING;
            continue;
        }
        const Moved got = receive_some();
        if (got.io == Io::MOVED) {
            take(got.bytes);
            received += got.bytes;
            if (expired(job_.deadline_ns) && at_ < segments_.size()) return end(LATE), Need::NOTHING;
            continue;
        }
        const Io sent = write_list(*client_.stream_, outgoing_);
        if (got.io == Io::CLOSED || sent == Io::CLOSED) return end(PEER_LOST), Need::NOTHING;
        return sent == Io::WANT_WRITE && got.io == Io::WANT_READ ? Need::READ_OR_WRITE : need_of(got.io);
    }
    return Need::TURN;
}

// The group under way is whole, and so is the head of the one behind it. False: the peer broke the protocol.
bool TcpReading::next_group() {
    if (heads_taken_ != 0 && !end_group(groups_[heads_taken_ - 1], heads_[(heads_taken_ - 1) % 2])) return false;
    if (heads_taken_ == groups_.size()) return done_ = true;
    const size_t g = heads_taken_++;
    return begin_group(groups_[g], heads_[g % 2]);
}

TcpReading::Segment TcpReading::head_segment(size_t g) {
    Head& head = heads_[g % 2];
    return {reinterpret_cast<uint8_t*>(&head), sizeof(wire::Group) + wire::padded_statuses(groups_[g].count), kControl};
}

// A group's head has arrived: plan its blocks, its trailers and the next head as one list of segments.
bool TcpReading::begin_group(const Planned& plan, const Head& head) {
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
    if (heads_taken_ < groups_.size()) segments_.push_back(head_segment(heads_taken_));
    return true;
}

// Everything of a group has arrived: decide its blocks.
bool TcpReading::end_group(const Planned& plan, const Head& head) {
    size_t t = 0;
    for (uint32_t i = 0; i < plan.count; ++i) {
        if (head.statuses[i] != OK) continue;
        const wire::Trailer& trailer = trailer_[t++];
        if (trailer.position != plan.first + i) return false;
        statuses_[asked_[plan.asked + i]] = decide(plan.asked + i, i, trailer);
    }
    return true;
}

Status TcpReading::decide(uint32_t asked, uint32_t i, const wire::Trailer& trailer) const {
    const uint64_t generation = record(asked).generation;
    if (headers_[i].generation == generation && trailer.generation_after != generation) return TORN;  // so may be the header
    const Status found = verify_header(headers_[i], record(asked), job_.blocks[asked_[asked]]);
    if (found != OK) return found;
    return !job_.check || checksums_[i] == record(asked).checksum ? OK : CORRUPT;
}

Moved TcpReading::receive_some() {
    std::array<iovec, kPartsMax> parts;
    size_t count = 0, bytes = 0;
    for (size_t s = at_; s < segments_.size() && count < kPartsMax && bytes < kReceiveBytes; ++s) {
        const Segment& segment = segments_[s];
        const size_t part = std::min(segment.bytes - segment.done, kReceiveBytes - bytes);
        parts[count++] = {segment.at + segment.done, part};
        bytes += part;
    }
    return client_.stream_->readv(parts.data(), count);
}

void TcpReading::take(size_t bytes) {
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
void TcpReading::hash_part(const Segment& segment, size_t part) {
    if (segment.done == 0 && part == segment.bytes) {
        checksums_[segment.slot] = hash64(segment.at, part);
        return;
    }
    if (segment.done == 0) hash_.reset();
    hash_.update(segment.at + segment.done, part);
    if (segment.done + part == segment.bytes) checksums_[segment.slot] = hash_.value();
}

}  // namespace kvdir
