// A region read from a second mapping: against the index it holds, against damage of every kind, and while it is written to.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <set>
#include <thread>

#include "check.hpp"
#include "view.hpp"

using namespace kvdir;

namespace {

using Names = std::set<u32>;  // node_id << 8 | tier, spread over the answer's sets

std::string fresh_path() {
    static int number = 0;
    const char* memory = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    return std::string(memory) + "/kvdir-test-" + std::to_string(getpid()) + "-" + std::to_string(number++);
}

struct Packed {
    explicit Packed(const std::vector<u64>& numbers) : numbers(numbers) {}
    Fingerprints operator*() const { return {reinterpret_cast<const u8*>(numbers.data()), numbers.size(), 8}; }
    std::vector<u64> numbers;
};

struct Place {
    Place() { place.path = fresh_path(); }
    ~Place() { unlink((place.path + ".lock").c_str()); }
    std::unique_ptr<Index> index(u64 seed = 1) const {
        auto made = std::make_unique<Index>(place, 0, seed);
        made->region().file()->publish();
        return made;
    }
    RegionPlace place;
};

// Who is named for each position.
std::vector<std::set<std::pair<u32, u32>>> named(const RegionAnswer& answer, u64 asked) {
    std::vector<std::set<std::pair<u32, u32>>> out(asked);
    u64 end = 0, hits = 0;
    for (u64 i = 0; i < answer.runs.size(); i += 3) {
        u32 start = answer.runs[i], count = answer.runs[i + 1], set = answer.runs[i + 2];
        CHECK(start >= end && count > 0 && start + count <= asked && set < answer.sets.ends.size());
        CHECK(i == 0 || start > end || set != answer.runs[i - 1]);  // neighbours with one set are one run
        end = start + count;
        hits += count;
        u64 first = set ? answer.sets.ends[set - 1] : 0, last = answer.sets.ends[set];
        CHECK(first < last && last <= answer.sets.holders.size());
        for (u64 at = first; at < last; ++at) {
            CHECK(at == first || answer.sets.holders[at] > answer.sets.holders[at - 1]);
            u32 member = answer.sets.holders[at];
            CHECK(member >> 8 < answer.nodes.size());
            for (u32 position = start; position < end; ++position) out[position].insert({answer.nodes[member >> 8], member & 0xFF});
        }
    }
    CHECK(hits == answer.hits);
    return out;
}

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
                std::set<std::pair<u32, u32>> members;
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
    index->region().end_section();
    CHECK(region_lookup(view, *blocks, 0, true).hits == numbers.size());
}

// --- sections: every state between two of them, looked at without any luck ------------------------------------------------------

// What is going on: blocks [first, end) of `holder` are changing, everything else is as in `truth`; or less, in an index with a
// bound, which evicts.
struct Watched {
    Watched(u64 blocks, u64 max_bytes) : bounded(max_bytes != 0), truth(blocks) {
        place.place.max_bytes = max_bytes;
        index = place.index();
        view = std::make_unique<RegionView>(place.place.path);
        for (u64 i = 0; i < blocks; ++i) chain.push_back(i + 1);
    }
    const bool bounded;
    Place place;
    std::unique_ptr<Index> index;
    std::unique_ptr<RegionView> view;
    std::vector<u64> chain;
    std::vector<std::set<std::pair<u32, u32>>> truth;
    u32 holder = 0;
    u64 first = 0, end = 0, seen = 0, states = 0, evicted = 0;

    // Everything that readers look at: table, sets, places, nodes; no last access and no reference counts.
    u64 digest() const {
        u64 hash = 0;
        auto mix = [&](u64 value) { hash = scramble(hash ^ value) + kGolden; };
        const IndexHeader& header = *index->region().at<IndexHeader>(Segment::header);
        for (u64 value : {header.table.capacity, header.table.old_capacity, header.table.old_last_key, header.table.total}) mix(value);
        const Slot* slots = index->region().at<Slot>(Segment::slots);
        for (u64 i = 0; i < header.table.total; ++i) mix(slots[i].key), mix(slots[i].set);
        const SetRecord* records = index->region().at<SetRecord>(Segment::records);
        for (u32 id = 1; id < header.sets.records; ++id) mix(u64{records[id].chunk} << 32 | records[id].count), mix(records[id].alias_of);
        for (Segment segment : {Segment::words, Segment::places}) {
            const u64* words = index->region().at<u64>(segment);
            for (u64 i = 0; i < index->region().extent(segment).committed_bytes / sizeof(u64); ++i) mix(words[i]);
        }
        return hash;
    }
    void look() {
        auto names = named(region_lookup(*view, *Packed(chain), 0, false), chain.size());
        for (u64 i = 0; i < chain.size(); ++i) {
            if (i >= first && i < end) names[i].erase({holder, 1}), truth[i].erase({holder, 1});
            CHECK(bounded ? std::includes(truth[i].begin(), truth[i].end(), names[i].begin(), names[i].end()) : names[i] == truth[i]);
        }
        ++states;
    }
    void change() {
        first = below(chain.size()), end = first + 1 + below(std::min<u64>(chain.size() - first, bounded ? 1000 : chain.size()));
        Packed batch({chain.begin() + static_cast<long>(first), chain.begin() + static_cast<long>(end)});
        bool there = false;
        switch (below(6)) {
            case 0:
                first = 0, end = chain.size();
                index->drop(holder);
                break;
            case 1: first = end; index->sweep(below(500)); break;
            case 2: index->remove(*batch, 0, holder, nullptr); break;
            case 3: {
                std::vector<u64> keys((*batch).count);
                std::vector<u8> access(keys.size() * 4, 1);
                index->keys(*batch, 0, keys.data());
                if (bounded) evicted += index->make_room(keys.size(), holder).keys.size();
                index->restore({reinterpret_cast<const u8*>(keys.data()), keys.size(), 8}, access.data(), holder);
                there = true;
                break;
            }
            default:
                if (bounded) evicted += index->make_room((*batch).count, holder).keys.size();
                index->store(*batch, 0, holder, 1 + static_cast<u32>(below(9)), nullptr);
                there = true;
        }
        for (u64 i = first; there && i < end; ++i) truth[i].insert({holder, 1});
        first = end = 0;
    }
};
Watched* watched = nullptr;

void watch(u64 blocks, u64 max_bytes, int steps) {
    constexpr u32 holders = 5;
    Watched here(blocks, max_bytes);
    Roster roster(here.index->region());
    for (u32 holder = 0; holder < holders; ++holder) roster.set_holder(holder, holder, 1, true), roster.set_node(holder, "n", 1);
    watched = &here;
    here.seen = here.digest();
    here.index->region().section_hook = [](bool begins) {
        if (begins) {
            CHECK(watched->digest() == watched->seen);
            return;
        }
        watched->seen = watched->digest();
        watched->look();
    };
    for (int step = 0; step < steps; ++step) {
        here.holder = static_cast<u32>(below(holders));
        here.change();
        CHECK(here.digest() == here.seen);
        here.look();
    }
    CHECK(max_bytes == 0 || here.evicted > 1000);
    here.index->region().section_hook = nullptr;
    std::printf("    %llu states\n", static_cast<unsigned long long>(here.states));
}

TEST(readers_see_whole_blocks_between_sections_and_nothing_is_written_outside_of_them) { watch(2500, 0, 300); }

TEST(evictions_keep_to_sections_too) { watch(6000, Index::kLeastBytes, 60); }

// --- hostile contents ----------------------------------------------------------------------------------------------------------

struct Damaged {
    Damaged() : index(place.index()), roster(index->region()), base(index->region().at<u8>(Segment::header)) {
        std::vector<u64> numbers(4000);
        for (u64 i = 0; i < numbers.size(); ++i) numbers[i] = i + 1;
        for (u32 holder = 0; holder < 9; ++holder) {
            roster.set_holder(holder, holder % 4, static_cast<u8>(holder % 3), true);
            roster.set_node(holder % 4, "record", 6);
            u64 first = below(2000), count = below(2000);
            index->store(*Packed({numbers.begin() + static_cast<long>(first), numbers.begin() + static_cast<long>(first + count)}), 0,
                         holder, 1, nullptr);
        }
        index->drop(3), index->drop(7);  // aliases and dead sets
        roster.set_namespaces("namespaces", 10), roster.beat("beat", 4);
        for (u32 i = 0; i < kSegments; ++i) extents[i] = index->region().extent(static_cast<Segment>(i));
    }
    // A random place in what is committed, most often in the header and the small tables.
    u8* somewhere() {
        const Extent& extent = extents[below(3) ? below(kSegments) : 0];
        if (extent.committed_bytes == 0) return nullptr;
        u64 most = below(2) ? std::min<u64>(extent.committed_bytes, sizeof(IndexHeader)) : extent.committed_bytes;
        return base + extent.offset + below(most);
    }
    Place place;
    std::unique_ptr<Index> index;
    Roster roster;
    u8* base;
    Extent extents[kSegments];
};

void read_everything(const RegionView& view) {
    std::vector<u64> question(700);
    for (u64& number : question) number = 1 + below(5000);
    std::sort(question.begin(), question.end());
    for (bool prefix : {false, true}) named(region_lookup(view, *Packed(question), 0, prefix), question.size());
    std::string out;
    view.sheet(Segment::beat, 0, kBeatBytes, out);
    view.sheet(Segment::namespaces, 0, kNamespaceBytes, out);
    for (u32 id : view.nodes()) view.node(id, out);
    for (u32 id : {0u, 3u, 70000u, ~0u}) view.node(id, out);
    view.holders();
    view.stats();
    view.stale();
}

constexpr u64 kWords[] = {0, 1, 2, 0xFF, 0xFFFF, 1u << 31, 0xFFFFFFFF, u64{1} << 32, u64{1} << 63, ~u64{0}, ~u64{0} - 3};

TEST(no_damage_makes_a_reader_crash_or_stay) {
    Damaged damaged;
    RegionView view(damaged.place.place.path);
    auto longest = std::chrono::steady_clock::duration::zero();
    for (int round = 0; round < 4000; ++round) {
        std::vector<std::pair<u8*, u8>> undo;
        for (u64 edits = 1 + below(6); edits; --edits) {
            u8* place = damaged.somewhere();
            if (!place) continue;
            if (below(2)) {
                undo.push_back({place, *place});
                *place = static_cast<u8>(below(2) ? below(256) : *place ^ (1u << below(8)));
                continue;
            }
            u64 word = kWords[below(std::size(kWords))];
            place = reinterpret_cast<u8*>(reinterpret_cast<u64>(place) & ~u64{7});
            for (u64 i = 0; i < 8; ++i) {
                undo.push_back({place + i, place[i]});
                place[i] = static_cast<u8>(word >> (8 * i));
            }
        }
        auto begin = std::chrono::steady_clock::now();
        read_everything(view);
        longest = std::max(longest, std::chrono::steady_clock::now() - begin);
        for (auto at = undo.rbegin(); at != undo.rend(); ++at) *at->first = at->second;
    }
    CHECK_SOUND(*damaged.index);
    CHECK(region_lookup(view, *Packed({1, 2, 3}), 0, false).torn == false);
    CHECK(longest < std::chrono::seconds(2));  // under sanitizers, on a busy machine
}

TEST(a_damaged_file_is_refused_or_read_safely_and_never_believed_beyond_its_end) {
    Damaged damaged;
    std::string path = damaged.place.place.path, copy = path + "-copy";
    u64 committed = damaged.index->region().extent(Segment::beat).offset + kBeatBytes;
    std::vector<u8> header(sizeof(IndexHeader));
    std::memcpy(header.data(), damaged.index->region().at<u8>(Segment::header), header.size());
    int opened = 0, refused = 0;
    for (int round = 0; round < 1500; ++round) {
        std::vector<u8> bytes = header;
        for (u64 edits = below(4); edits; --edits) {
            u64 at = below(bytes.size() / 8) * 8, word = kWords[below(std::size(kWords))];
            if (below(2)) std::memcpy(&bytes[at], &word, sizeof word);
            else bytes[at] = static_cast<u8>(below(256));
        }
        u64 file_bytes = below(3) ? damaged.index->region().extent(Segment::beat).offset + Region::kHugePage : below(committed);
        int fd = open(copy.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
        CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(file_bytes)) == 0);
        u64 written = std::min<u64>(bytes.size(), file_bytes);
        CHECK(pwrite(fd, bytes.data(), written, 0) == static_cast<ssize_t>(written));
        close(fd);
        try {
            RegionView view(copy);
            ++opened;
            if (round % 8 == 0) read_everything(view);
        } catch (const RegionError&) {
            ++refused;
        }
    }
    unlink(copy.c_str());
    CHECK(opened > 100 && refused > 100);
}

// --- a writer at work ----------------------------------------------------------------------------------------------------------

// What may and what must be answered, per block: a block's two holders come and go one after the other, and each change is
// announced before and confirmed after. Readers judge every answer by what was announced when they had it.
struct Book {
    static constexpr u64 kBlocks = 20000, kHolders = 6;
    std::atomic<u8> may[kHolders][kBlocks] = {};   // 1: it may be answered
    std::atomic<u8> must[kHolders][kBlocks] = {};  // 1: it must be answered
    std::atomic<u32> turn[kHolders][kBlocks] = {};  // rises with every change of either
};

TEST(every_answer_is_true_while_a_writer_works) {
    Place place;
    auto index = place.index();
    auto book = std::make_unique<Book>();
    Roster roster(index->region());
    for (u32 holder = 0; holder < Book::kHolders; ++holder) {
        roster.set_holder(holder, holder, 1, true);
        roster.set_node(holder, "n", 1);
    }
    std::atomic<bool> ended{false};
    std::atomic<u64> answers{0}, torn{0};

    auto read = [&](u64 seed) {
        std::mt19937_64 bits(seed);
        RegionView view(place.place.path);
        std::vector<u64> question(600);
        std::vector<std::array<u32, Book::kHolders>> turns(question.size());
        std::vector<std::array<u8, Book::kHolders>> musts(question.size());
        while (!ended) {
            u64 first = bits() % (Book::kBlocks - question.size());
            for (u64 i = 0; i < question.size(); ++i) {
                question[i] = first + i + 1;
                for (u32 holder = 0; holder < Book::kHolders; ++holder) {
                    turns[i][holder] = book->turn[holder][first + i];
                    musts[i][holder] = book->must[holder][first + i];
                }
            }
            RegionAnswer answer = region_lookup(view, *Packed(question), 0, false);
            ++answers;
            torn += answer.torn;
            auto names = named(answer, question.size());
            for (u64 i = 0; i < question.size(); ++i) {
                for (u32 holder = 0; holder < Book::kHolders; ++holder) {
                    bool said = names[i].count({holder, 1}), may = book->may[holder][first + i];
                    if (book->turn[holder][first + i] != turns[i][holder]) continue;  // it changed meanwhile: either is right
                    CHECK(!said || may);
                    CHECK(said || !musts[i][holder] || answer.torn);
                }
            }
        }
    };
    std::vector<std::thread> readers;
    for (u64 i = 0; i < 2; ++i) readers.emplace_back(read, i);

    auto announce = [&](u32 holder, u64 first, u64 count, bool may, bool must) {
        for (u64 i = first; i < first + count; ++i) {
            if (may) book->may[holder][i] = 1;
            if (!must) book->must[holder][i] = 0;
            ++book->turn[holder][i];
        }
    };
    auto confirm = [&](u32 holder, u64 first, u64 count, bool there) {
        for (u64 i = first; i < first + count; ++i) {
            ++book->turn[holder][i];
            book->may[holder][i] = book->must[holder][i] = there;
        }
    };
    auto end = std::chrono::steady_clock::now() + std::chrono::seconds(3);
    while (std::chrono::steady_clock::now() < end || answers < 50) {
        u32 holder = static_cast<u32>(below(Book::kHolders));
        u64 first = below(Book::kBlocks), count = 1 + below(std::min<u64>(3000, Book::kBlocks - first));
        std::vector<u64> numbers(count);
        for (u64 i = 0; i < count; ++i) numbers[i] = first + i + 1;
        switch (below(8)) {
            case 0:
                announce(holder, 0, Book::kBlocks, true, false);
                index->drop(holder);
                confirm(holder, 0, Book::kBlocks, false);
                break;
            case 1: index->sweep(below(5000)); break;
            case 2:
            case 3:
                announce(holder, first, count, true, false);
                index->remove(*Packed(numbers), 0, holder, nullptr);
                confirm(holder, first, count, false);
                break;
            default:
                announce(holder, first, count, true, false);
                index->store(*Packed(numbers), 0, holder, 1, nullptr);
                confirm(holder, first, count, true);
        }
    }
    ended = true;
    for (std::thread& reader : readers) reader.join();
    CHECK_SOUND(*index);
    CHECK(torn < answers);
    std::printf("    %llu answers, %llu torn\n", static_cast<unsigned long long>(answers), static_cast<unsigned long long>(torn));
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
