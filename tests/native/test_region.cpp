// A region read from a second mapping: against the index it holds, and one path in many lives.
#include <sys/stat.h>

#include <chrono>
#include <map>

#include "region_fixture.hpp"

namespace {

TEST(answers_are_those_of_the_index_with_nodes_for_holders) {
    Place place;
    auto index = place.index();
    RegionView view(place.place.path);
    Roster roster(index->region());
    std::map<u32, std::pair<u32, u32>> places;  // holder -> node, tier; visible ones only
    constexpr u32 holders = 12, nodes = 5;
    std::vector<u64> chain(3000);
    for (u64 i = 0; i < chain.size(); ++i) chain[i] = i + 1;
    for (int step = 0; step < 4000; ++step) {
        u32 holder = static_cast<u32>(below(holders));
        u64 start = below(chain.size()), count = below(std::min<u64>(600, chain.size() - start) + 1);
        Packed batch({chain.begin() + static_cast<long>(start), chain.begin() + static_cast<long>(start + count)});
        switch (below(10)) {
            case 0: index->drop(holder); break;
            case 1: index->remove(*batch, 0, holder, nullptr); break;
            case 2: index->sweep(below(200)); break;
            case 3: {
                bool visible = below(3) != 0;
                u32 node = static_cast<u32>(below(nodes)), tier = static_cast<u32>(below(4));
                roster.set_holder(holder, node, static_cast<u8>(tier), visible);
                places.erase(holder);
                if (visible) places[holder] = {node, tier};
                break;
            }
            case 4: roster.clear_holder(holder), places.erase(holder); break;
            case 5: roster.set_node(static_cast<u32>(below(nodes)), "record", 6); break;
            default: index->store(*batch, 0, holder, 1, nullptr);
        }
        for (bool prefix : {false, true}) {
            RegionAnswer answer = region_lookup(view, *batch, 0, prefix);
            Answer truth = prefix ? index->lookup_prefix(*batch, 0) : index->lookup_sparse(*batch, 0);
            CHECK(!answer.torn);
            auto names = named(answer, count);
            decltype(names) expected(count);
            bool cut = false;
            u64 end = 0;
            for (u64 i = 0; i < truth.runs.size() && !cut; i += 3) {
                u32 set = truth.runs[i + 2];
                Named members;
                for (u64 at = set ? truth.sets.ends[set - 1] : 0; at < truth.sets.ends[set]; ++at) {
                    auto known = places.find(truth.sets.holders[at]);
                    std::string record;
                    if (known == places.end() || view.node(known->second.first, record) == 0) continue;
                    members.insert(known->second);
                }
                cut = prefix && members.empty();
                end = truth.runs[i] + truth.runs[i + 1];
                for (u64 at = truth.runs[i]; at < end; ++at) expected[at] = members;
            }
            CHECK(names == expected);
        }
    }
}

TEST(a_node_is_never_taken_for_the_next_one_in_its_slot) {
    Place place;
    auto index = place.index();
    RegionView view(place.place.path);
    Roster roster(index->region());
    Packed blocks({1, 2, 3});
    index->store(*blocks, 0, 9, 1, nullptr);
    roster.set_holder(9, 4, 2, true);
    std::string record;
    for (u32 life = 0; life < 70000; ++life) {
        roster.set_node(4, &life, sizeof life);
        if (life % 1000 > 2) {
            roster.clear_node(4);
            continue;
        }
        RegionAnswer answer = region_lookup(view, *blocks, 0, false);
        CHECK(answer.hits == 3 && answer.nodes.size() == 1);
        CHECK(view.node(answer.nodes[0], record) && std::memcmp(record.data(), &life, sizeof life) == 0);
        roster.clear_node(4);
        CHECK(view.node(answer.nodes[0], record) == 0);
        CHECK(region_lookup(view, *blocks, 0, false).hits == 0);
    }
}

TEST(sheets_are_read_as_written) {
    Place place;
    auto index = place.index();
    RegionView view(place.place.path);
    Roster roster(index->region());
    std::string out;
    CHECK(view.sheet(Segment::beat, 0, kBeatBytes, out) == 0);
    CHECK(view.sheet(Segment::namespaces, 0, kNamespaceBytes, out) == 0);
    for (u64 bytes : {0, 1, 7, 8, 9, 4000, 100001, 3}) {
        std::string data(bytes, 'x');
        for (char& byte : data) byte = static_cast<char>(below(256));
        CHECK(roster.set_namespaces(data.data(), data.size()));
        CHECK(view.sheet(Segment::namespaces, 0, kNamespaceBytes, out) && out == data);
        if (bytes > 4000) continue;
        roster.beat(data.data(), static_cast<u32>(bytes));
        CHECK(view.sheet(Segment::beat, 0, kBeatBytes, out) && out == data);
    }
}

// A writer that died in the middle of a section: answers within the patience, torn, and the second one without waiting again.
TEST(a_section_that_never_ends_makes_answers_torn_and_nothing_worse) {
    Place place;
    auto index = place.index();
    RegionView view(place.place.path);
    Roster roster(index->region());
    roster.set_holder(1, 0, 1, true), roster.set_node(0, "n", 1);
    std::vector<u64> numbers(5000);
    for (u64 i = 0; i < numbers.size(); ++i) numbers[i] = i + 1;
    Packed blocks(numbers);
    index->store(*blocks, 0, 1, 1, nullptr);
    CHECK(region_lookup(view, *blocks, 0, false).hits == numbers.size());
    index->region().begin_section();
    auto begin = std::chrono::steady_clock::now();
    for (bool prefix : {false, true}) {
        RegionAnswer answer = region_lookup(view, *blocks, 0, prefix);
        CHECK(answer.torn && answer.hits == 0);
    }
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(1));
    CHECK(view.stuck(view.sequence()));  // so nobody waits for it again
    index->region().end_section();
    CHECK(region_lookup(view, *blocks, 0, true).hits == numbers.size());
}

// --- one path, many lives --------------------------------------------------------------------------------------------------------

TEST(one_writer_a_path_and_readers_are_told_of_the_next) {
    Place place;
    auto first = place.index();
    RegionView view(place.place.path);
    try {
        place.index();
        CHECK(false);
    } catch (const RegionError& error) {
        CHECK(std::string(error.what()).find("has a writer already (process " + std::to_string(getpid())) != std::string::npos);
    }
    CHECK(!view.stale());
    Index second(first->region().file()->place(), 0, 2);
    CHECK(!view.stale() && RegionView(place.place.path).generation() == view.generation());
    second.region().file()->publish();
    CHECK(view.stale());
    first.reset();
    RegionView next(place.place.path);
    CHECK(next.generation() != view.generation() && next.seed() == 2 && !next.stale());
    second.region().close();
    CHECK(next.stale() && access(place.place.path.c_str(), F_OK) != 0);
    CHECK(region_lookup(next, *Packed({1}), 0, false).hits == 0);
    place.index();
}

TEST(a_region_keeps_to_its_limit_and_what_it_has) {
    Place place;
    place.place.max_bytes = 8 << 20;
    auto index = place.index();
    RegionView view(place.place.path);
    Roster(index->region()).set_holder(1, 0, 1, true), Roster(index->region()).set_node(0, "n", 1);
    u64 stored = 0;
    bool full = false;
    for (u64 next = 1; !full && next < 2000000; next += 1000) {
        std::vector<u64> numbers(1000);
        for (u64 i = 0; i < 1000; ++i) numbers[i] = next + i;
        try {
            stored += index->store(*Packed(numbers), 0, 1, 1, nullptr);
        } catch (const std::bad_alloc&) {
            full = true;
        }
    }
    CHECK(full && stored > 200000 && index->stats().bytes <= (8 << 20) + (1 << 20));
    CHECK_SOUND(*index);
    std::vector<u64> numbers(1000);
    for (u64 i = 0; i < 1000; ++i) numbers[i] = i + 1;
    CHECK(region_lookup(view, *Packed(numbers), 0, false).hits == 1000);
    struct stat status{};
    CHECK(stat(place.place.path.c_str(), &status) == 0 && status.st_blocks * 512 <= (8 << 20));
}

}  // namespace
