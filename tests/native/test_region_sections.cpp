// A region that is read while it is written: at every end of a section without any luck, and by threads beside a writer.
#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include "region_fixture.hpp"

namespace {

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
    std::vector<Named> truth;
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
}  // namespace
