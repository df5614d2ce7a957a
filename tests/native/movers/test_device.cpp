// Blocks verified and hashed where they lie, addresses for a device's copies, and copies begun through a driver's function.
#include "arena.hpp"
#include "device.hpp"
#include "hash.hpp"

using namespace kvdir;

namespace {

constexpr uint64_t kSize = 5000, kSlots = 4;

template <typename Body>
bool refused(Body body) {
    try {
        body();
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

std::vector<uint8_t> verify(const Arena& arena, const Arena::Content& content, bool check) {
    std::vector<uint8_t> statuses(content.records.size(), 255);
    verify_blocks({arena.memory.get(), arena.bytes}, content.records.data(), content.blocks(), check, statuses.data());
    return statuses;
}

struct Begun {
    uint64_t to, from;
    size_t bytes;
};
std::vector<Begun> begun;
int copy_now(uint64_t to, uint64_t from, size_t bytes, void* stream) {
    if (begun.size() == *static_cast<size_t*>(stream)) return 700;
    begun.push_back({to, from, bytes});
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    return 0;
}

}  // namespace

TEST(blocks_in_place_are_ok_until_they_change) {
    Arena owner(kSize, kSlots);
    Arena::Content content = owner.fill();
    for (const bool check : {false, true}) CHECK(verify(owner, content, check) == std::vector<uint8_t>(kSlots, OK));
    const Region& region = owner.region;
    region.payload(content.records[1].offset)[kSize - 1] ^= 1;
    CHECK(verify(owner, content, false)[1] == OK);
    CHECK(verify(owner, content, true)[1] == CORRUPT);
    make_odd(region.slot(content.records[2].offset));
    CHECK(verify(owner, content, true)[2] == STALE);
    CHECK(verify(owner, content, true)[0] == OK && verify(owner, content, true)[3] == OK);
}

TEST(records_outside_of_the_region_are_absent_when_verified_in_place) {
    Arena owner(kSize, kSlots);
    Arena::Content content = owner.fill();
    content.records[0].offset = owner.bytes;
    content.records[1].offset += 1;
    content.records[2].length = 1U << 31;
    content.records[3].state = 0;
    CHECK(verify(owner, content, true) == std::vector<uint8_t>(kSlots, ABSENT));
}

TEST(checksums_are_of_the_bytes_in_the_slots) {
    Arena owner(kSize, kSlots);
    const Arena::Content content = owner.fill();
    std::vector<uint64_t> offsets = owner.offsets, sums(kSlots);
    payload_checksums(owner.region, offsets.data(), kSlots, kSize, sums.data());
    for (uint64_t i = 0; i < kSlots; ++i) CHECK(sums[i] == content.records[i].checksum);
    offsets[0] += 128;
    CHECK(refused([&] { payload_checksums(owner.region, offsets.data(), kSlots, kSize, sums.data()); }));
}

TEST(addresses_are_given_of_reserved_slots_only) {
    Arena owner(kSize, kSlots);
    owner.fill();
    std::vector<uint64_t> offsets = owner.offsets, addresses(kSlots);
    const auto ask = [&](uint64_t length) { reserved_payloads(owner.region, offsets.data(), offsets.size(), length, addresses.data()); };
    CHECK(refused([&] { ask(kSize); }));
    owner.reserve();
    ask(kSize);
    for (uint64_t i = 0; i < kSlots; ++i)
        CHECK(addresses[i] == reinterpret_cast<uint64_t>(owner.region.payload(offsets[i])));
    CHECK(refused([&] { ask(kSize + 1); }));
    offsets[1] = offsets[0];
    CHECK(refused([&] { ask(kSize); }));
}

TEST(spans_of_host_memory_are_copied_whole) {
    uint8_t from[6] = {1, 2, 3, 4, 5, 6}, to[6] = {};
    const std::vector<uint64_t> sources{reinterpret_cast<uint64_t>(from), reinterpret_cast<uint64_t>(from + 4)};
    const std::vector<uint64_t> destinations{reinterpret_cast<uint64_t>(to + 3), reinterpret_cast<uint64_t>(to)};
    const std::vector<uint64_t> lengths{3, 2};
    copy_spans(destinations.data(), sources.data(), lengths.data(), 2);
    const uint8_t expected[6] = {5, 6, 0, 1, 2, 3};
    CHECK(std::memcmp(to, expected, sizeof to) == 0);
}

TEST(copies_are_begun_in_order_until_one_is_refused) {
    uint8_t from[3] = {1, 2, 3}, to[3] = {};
    std::vector<uint64_t> sources, destinations, lengths(3, 1);
    for (size_t i = 0; i < 3; ++i) {
        sources.push_back(reinterpret_cast<uint64_t>(from + i));
        destinations.push_back(reinterpret_cast<uint64_t>(to + i));
    }
    for (const size_t limit : {size_t{9}, size_t{2}, size_t{0}}) {
        begun.clear();
        std::memset(to, 0, sizeof to);
        size_t stream = limit;
        const CopyBegun answer = begin_copies(copy_now, destinations.data(), sources.data(), lengths.data(), 3, &stream);
        CHECK(answer.begun == std::min<size_t>(limit, 3) && answer.code == (limit < 3 ? 700 : 0));
        for (size_t i = 0; i < 3; ++i) CHECK(to[i] == (i < answer.begun ? from[i] : 0));
    }
}
