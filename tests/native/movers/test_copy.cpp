// Slots and scattered copies: life of a slot, damaged records and superblocks, a writer in the way.
#include <atomic>
#include <thread>

#include "arena.hpp"
#include "hash.hpp"

using namespace kvdir;

namespace {

template <typename Body>
bool refused(Body body) {
    try {
        body();
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

Source source_of(const Arena& arena) { return {arena.memory.get(), arena.bytes}; }

}  // namespace

TEST(blocks_survive_a_round_trip_for_many_sizes) {
    for (const uint64_t size : {1, 7, 128, 129, 4096, 65535, 65536, 65537, 200000}) {
        Arena owner(size, 5), reader(size, 5);
        const Arena::Content content = owner.fill();
        reader.reserve();
        const auto to = reader.destinations(content.records);
        for (const bool check : {false, true}) {
            std::vector<uint8_t> statuses(5, 255);
            read_blocks(source_of(owner), content.records.data(), content.blocks(), to.data(), check, 0, nullptr, statuses.data());
            for (uint64_t i = 0; i < 5; ++i) CHECK(statuses[i] == OK && owner.same_payload(i, reader));
        }
    }
}

TEST(checksum_in_pieces_equals_one_shot) {
    std::vector<uint8_t> data(300000);
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(random_bits()());
    for (int round = 0; round < 300; ++round) {
        const size_t length = below(2) != 0 ? below(600) : below(data.size());
        PieceHash hash;
        for (size_t at = 0; at < length;) {
            const size_t piece = std::min<size_t>(1 + below(70000), length - at);
            hash.update(data.data() + at, piece);
            at += piece;
        }
        CHECK(hash.value() == hash64(data.data(), length));
        CHECK(hash64(data.data(), length) == detail::baseline.one_shot(data.data(), length));
    }
}

TEST(random_records_never_read_outside_the_source) {
    Arena owner(3000, 8), reader(3000, 8);
    const Arena::Content content = owner.fill();
    reader.reserve();
    for (int round = 0; round < 20000; ++round) {
        std::vector<Record> records = content.records;
        for (Record& record : records) {
            if (below(2) != 0) record.offset = below(3) != 0 ? below(owner.bytes + 500) / 128 * 128 : random_bits()();
            if (below(3) == 0) record.length = static_cast<uint32_t>(below(2) != 0 ? below(8000) : random_bits()());
            if (below(4) == 0) record.generation = below(8);
            if (below(8) == 0) record.state = static_cast<uint32_t>(below(4));
        }
        const auto to = reader.destinations(records);
        std::vector<uint8_t> statuses(8, 255);
        read_blocks(source_of(owner), records.data(), content.blocks(), to.data(), below(2) != 0, 0, nullptr, statuses.data());
        for (uint64_t i = 0; i < 8; ++i) {
            CHECK(statuses[i] <= CORRUPT);
            if (statuses[i] == OK) CHECK(owner.same_payload(i, reader));
        }
    }
}

TEST(damaged_superblocks_are_refused_or_stay_in_range) {
    for (int round = 0; round < 20000; ++round) {
        Arena arena(500, 3);
        for (uint64_t flips = 1 + below(3); flips != 0; --flips) arena.memory.get()[below(200)] ^= static_cast<uint8_t>(1 + below(255));
        refused([&] {
            const Region region(arena.memory.get(), arena.bytes);
            for (int tries = 0; tries < 20; ++tries) {
                const uint64_t offset = below(arena.bytes + 1000);
                const SizeClass* found = region.class_at(offset);
                if (found == nullptr) continue;
                CHECK(offset + kHeaderBytes + found->block_bytes <= arena.bytes);
                std::memset(region.payload(offset), 1, found->block_bytes);  // AddressSanitizer judges
            }
        });
    }
}

TEST(added_classes_are_whole_for_readers_and_never_overlap) {
    Arena arena(500, 3);
    const uint64_t spare = 64 * arena.stride;
    std::vector<uint8_t> memory(arena.bytes + spare + kAlignBytes);
    uint8_t* base = memory.data() + (kAlignBytes - reinterpret_cast<uintptr_t>(memory.data()) % kAlignBytes) % kAlignBytes;
    std::memcpy(base, arena.memory.get(), arena.bytes);
    reinterpret_cast<Superblock*>(base)->arena_bytes = arena.bytes + spare;
    reinterpret_cast<Superblock*>(base)->size_class[0].slots = 1;
    const auto region = [&] { return Region(base, arena.bytes + spare); };
    std::atomic<bool> done{false};
    std::thread reader([&] {
        size_t seen = 1;
        while (!done.load()) {
            const Region now = region();  // throws where a class is seen half written
            CHECK(now.classes().size() >= seen);
            seen = now.classes().size();
            CHECK(now.classes().back().slots == 1);
        }
    });
    uint64_t first = arena.bytes;
    for (uint32_t i = 1; i < kMaxClasses; ++i, first += arena.stride) {
        const SizeClass added{{}, 500, arena.stride, first, 1};
        add_class(region(), added);
        CHECK(refused([&] { add_class(region(), added); }));  // over itself
        CHECK(region().class_at(first) != nullptr);
    }
    done.store(true);
    reader.join();
    CHECK(refused([&] { add_class(region(), {{}, 500, arena.stride, first, 1}); }));  // one too many
    reinterpret_cast<Superblock*>(base)->classes = 1;
    for (const SizeClass& bad : {SizeClass{{}, 500, arena.stride, arena.bytes + spare, 1}, SizeClass{{}, 500, arena.stride, arena.bytes, 65},
                                 SizeClass{{}, 500, 64, arena.bytes, 1}, SizeClass{{}, 9000, arena.stride, arena.bytes, 1},
                                 SizeClass{{}, 500, arena.stride, arena.bytes, 0}, SizeClass{{}, 500, arena.stride, 0, 1}})
        CHECK(refused([&] { add_class(region(), bad); }));
    CHECK(region().classes().size() == 1);
}

TEST(wrong_offsets_change_nothing) {
    Arena arena(1000, 4);
    arena.fill();
    const std::vector<uint8_t> before(arena.memory.get(), arena.memory.get() + arena.bytes);
    std::vector<uint64_t> generations(2);
    for (const uint64_t bad : {uint64_t{0}, arena.offsets[0] + 64, arena.offsets[3] + arena.stride, uint64_t(arena.bytes), ~uint64_t{127}}) {
        const std::vector<uint64_t> offsets = {arena.offsets[0], bad};
        CHECK(refused([&] { begin_write(arena.region, offsets.data(), 2, generations.data()); }));
        CHECK(refused([&] { retire(arena.region, offsets.data(), 2); }));
    }
    const std::vector<uint64_t> twice = {arena.offsets[1], arena.offsets[2], arena.offsets[1]};
    CHECK(refused([&] { retire(arena.region, twice.data(), 3); }));
    CHECK(std::memcmp(before.data(), arena.memory.get(), arena.bytes) == 0);
}

TEST(reads_stop_when_told_and_when_late) {
    Arena owner(1000, 4), reader(1000, 4);
    const Arena::Content content = owner.fill();
    reader.reserve();
    const auto to = reader.destinations(content.records);
    std::vector<uint8_t> statuses(4, 255);
    read_blocks(source_of(owner), content.records.data(), content.blocks(), to.data(), true, 1, nullptr, statuses.data());
    CHECK(statuses == std::vector<uint8_t>(4, LATE));
    const std::atomic<bool> stop{true};
    read_blocks(source_of(owner), content.records.data(), content.blocks(), to.data(), true, 0, &stop, statuses.data());
    CHECK(statuses == std::vector<uint8_t>(4, PEER_LOST));
}

// Payload words are the generation they are committed under; the copies race with the writer on purpose.
TEST(reads_are_whole_while_a_writer_is_in_the_way) {
    Arena owner(4096, 4), reader(4096, 4);
    owner.fill();
    const std::vector<uint8_t> digest(kDigestBytes, 1), fingerprints(4 * Arena::kWidth, 2);
    std::atomic<bool> done{false};
    std::thread writer([&] {
        std::vector<uint64_t> words(512);
        while (!done.load()) {
            for (const uint64_t offset : owner.offsets) {
                uint64_t odd = 0, checksum = 0;
                Record record;
                begin_write(owner.region, &offset, 1, &odd);
                words.assign(512, odd + 1);
                const auto address = reinterpret_cast<uint64_t>(words.data());
                write_blocks(owner.region, &offset, &address, 1, 4096, &checksum);
                commit(owner.region, &offset, {1, digest.data(), fingerprints.data(), Arena::kWidth}, 4096, &checksum, &record);
            }
        }
    });
    reader.reserve();
    std::vector<Record> records(4);
    std::vector<uint8_t> statuses(4);
    uint64_t good = 0;
    for (int round = 0; round < 100000 && good < 20000; ++round) {
        read_records(owner.region, owner.offsets.data(), 4, records.data());
        const auto to = reader.destinations(records);
        const Blocks blocks{4, digest.data(), fingerprints.data(), Arena::kWidth};
        read_blocks(source_of(owner), records.data(), blocks, to.data(), false, 0, nullptr, statuses.data());
        for (int i = 0; i < 4; ++i) {
            CHECK(statuses[static_cast<size_t>(i)] != CORRUPT || records[static_cast<size_t>(i)].length != 4096);
            if (statuses[static_cast<size_t>(i)] != OK) continue;
            ++good;
            uint64_t words[512];
            std::memcpy(words, to[static_cast<size_t>(i)], sizeof words);
            for (const uint64_t word : words) CHECK(word == records[static_cast<size_t>(i)].generation);
        }
    }
    done = true;
    writer.join();
    CHECK(good > 0);
}
