// One-sided reads: what may be asked for, and what is believed of what came.
#include "gets.hpp"

#include <cstring>
#include <stdexcept>

#include "arena.hpp"
#include "hash.hpp"

using namespace kvdir;

namespace {

constexpr uint64_t kBlock = 1000, kSlots = 8;

struct Read {
    Arena source{kBlock, kSlots}, own{kBlock, kSlots};
    Arena::Content content = source.fill();
    Gets gets;

    Read() {
        own.reserve();
        gets = plan_gets(own.region, content.records.data(), own.offsets.data(), kSlots, source.bytes);
    }
    void bring_payloads() {
        for (size_t i = 0; i < gets.remote.size(); ++i)
            std::memcpy(reinterpret_cast<void*>(gets.local[i]), source.memory.get() + gets.remote[i], gets.lengths[i]);
    }
    std::vector<SlotHeader> headers() {
        std::vector<SlotHeader> found(gets.slots.size());
        for (size_t i = 0; i < found.size(); ++i) std::memcpy(&found[i], source.memory.get() + gets.slots[i], sizeof found[i]);
        return found;
    }
    std::vector<uint8_t> verify(const std::vector<SlotHeader>& found) {
        std::vector<uint8_t> statuses = gets.statuses;
        verify_gets(own.region, content.records.data(), content.blocks(), own.offsets.data(), found.data(), statuses.data());
        return statuses;
    }
};

bool throws(Read& read, const std::vector<uint64_t>& destinations) {
    try {
        plan_gets(read.own.region, read.content.records.data(), destinations.data(), kSlots, read.source.bytes);
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

}  // namespace

TEST(everything_that_came_is_believed_when_nothing_changed) {
    Read read;
    read.bring_payloads();
    for (const uint8_t status : read.verify(read.headers())) CHECK(status == OK);
}

TEST(a_slot_written_after_its_payload_came_is_not_believed) {
    Read read;
    read.bring_payloads();
    uint64_t generation = 0;
    begin_write(read.source.region, read.source.offsets.data(), 1, &generation);
    const auto statuses = read.verify(read.headers());
    CHECK(statuses[0] == STALE);
    CHECK(statuses[1] == OK);
}

TEST(a_slot_rewritten_with_the_same_block_is_not_believed) {
    Read read;
    read.bring_payloads();
    uint64_t generation = 0;
    Record record;
    begin_write(read.source.region, read.source.offsets.data(), 1, &generation);
    commit(read.source.region, read.source.offsets.data(), {1, read.content.digest.data(), read.content.fingerprints.data(), Arena::kWidth},
           kBlock, nullptr, &record);
    CHECK(read.verify(read.headers())[0] == STALE);
}

TEST(bytes_that_changed_on_the_way_are_corrupt) {
    Read read;
    read.bring_payloads();
    for (size_t i = 0; i < kSlots; ++i) read.own.region.payload(read.own.offsets[i])[below(kBlock)] ^= static_cast<uint8_t>(1U << below(8));
    for (const uint8_t status : read.verify(read.headers())) CHECK(status == CORRUPT);
}

TEST(any_flipped_bit_of_a_header_that_is_compared_is_seen) {
    Read read;
    read.bring_payloads();
    const auto whole = read.headers();
    for (size_t bit = 0; bit < kHeaderBytes * 8; ++bit) {
        auto found = whole;
        reinterpret_cast<uint8_t*>(&found[3])[bit / 8] ^= static_cast<uint8_t>(1U << bit % 8);
        const size_t byte = bit / 8;
        const bool compared = byte < 28 || (byte >= 32 && byte < 32 + Arena::kWidth) || (byte >= 64 && byte < 96);
        CHECK((read.verify(found)[3] == OK) != compared);
        CHECK(read.verify(found)[4] == OK);
    }
}

TEST(no_get_leaves_either_arena_whatever_a_record_says) {
    Read read;
    for (int round = 0; round < 20000; ++round) {
        auto records = read.content.records;
        Record& record = records[below(kSlots)];
        switch (below(4)) {
            case 0: record.offset = random_bits()() >> below(64); break;
            case 1: record.offset = read.source.bytes - below(4096) / kAlignBytes * kAlignBytes; break;
            case 2: record.length = static_cast<uint32_t>(random_bits()() >> below(64)); break;
            default: record = {~uint64_t{0} - below(256), 2, 0, static_cast<uint32_t>(random_bits()()), 1};
        }
        const Gets gets = plan_gets(read.own.region, records.data(), read.own.offsets.data(), kSlots, read.source.bytes);
        for (size_t i = 0; i < gets.remote.size(); ++i) {
            CHECK(gets.slots[i] + kHeaderBytes == gets.remote[i] && gets.slots[i] >= kSuperblockBytes);
            CHECK(gets.remote[i] <= read.source.bytes && gets.lengths[i] <= read.source.bytes - gets.remote[i]);
            CHECK(gets.lengths[i] <= kBlock);
            const uint64_t at = gets.local[i] - reinterpret_cast<uint64_t>(read.own.memory.get());
            CHECK(at >= kSuperblockBytes && at <= read.own.bytes - gets.lengths[i]);
        }
    }
}

TEST(destinations_that_are_not_distinct_reserved_slots_are_refused) {
    Read read;
    CHECK(!throws(read, read.own.offsets));
    auto wrong = read.own.offsets;
    wrong[2] = wrong[1];
    CHECK(throws(read, wrong));
    wrong[2] = 0;
    CHECK(throws(read, wrong));
    wrong[2] = read.own.offsets[2] + kAlignBytes;
    CHECK(throws(read, wrong));
    read.own.fill();  // committed: even
    CHECK(throws(read, read.own.offsets));
}
