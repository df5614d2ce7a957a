// An index with a bound against a map of sets that is told what was evicted: counts, answers and the bound itself.
#include <algorithm>
#include <map>
#include <set>

#include "check.hpp"
#include "index.hpp"

using namespace kvdir;

namespace {

struct Bounded {
    Bounded(u64 max_bytes, u64 seed) : index(0, seed, max_bytes), max_bytes(max_bytes) {}

    void store(const std::vector<u64>& numbers, u32 holder, u32 now_s) {
        note(index.make_room(numbers.size(), holder));
        u64 added = 0;
        for (u64 number : numbers) added += blocks[number].insert(holder).second;
        CHECK(index.store(packed(numbers), 0, holder, now_s, nullptr) == added);
        note(index.make_room(0, holder));
    }
    void remove(const std::vector<u64>& numbers, u32 holder) {
        u64 removed = 0;
        for (u64 number : numbers) {
            auto at = blocks.find(number);
            if (at == blocks.end() || at->second.erase(holder) == 0) continue;
            if (at->second.empty()) blocks.erase(at);
            ++removed;
        }
        CHECK(index.remove(packed(numbers), 0, holder, nullptr) == removed);
        note(index.make_room(0, holder));
    }
    void drop(u32 holder) {
        for (auto at = blocks.begin(); at != blocks.end();) {
            at->second.erase(holder);
            at = at->second.empty() ? blocks.erase(at) : std::next(at);
        }
        index.drop(holder);
    }
    void note(const Evicted& evicted) {
        CHECK(evicted.keys.size() == evicted.numbers.size());
        std::vector<u64> heads(evicted.keys.size());
        index.heads({reinterpret_cast<const u8*>(evicted.keys.data()), evicted.keys.size(), 8}, 0, heads.data());
        for (u64 i = 0; i < heads.size(); ++i) {
            u32 number = evicted.numbers[i];
            auto at = blocks.find(heads[i]);
            CHECK(at != blocks.end());
            u64 start = number ? evicted.sets.ends[number - 1] : 0;
            CHECK(evicted.sets.ends[number] > start);
            for (u64 h = start; h < evicted.sets.ends[number]; ++h) CHECK(at->second.erase(evicted.sets.holders[h]) == 1);
            if (at->second.empty()) blocks.erase(at);
            ++lost;
        }
    }
    void compare() const {
        CHECK_SOUND(index);
        CHECK(index.stats().bytes <= max_bytes);
        std::map<u32, u64> counts;
        std::vector<u64> numbers;
        for (const auto& [number, holders] : blocks) {
            for (u32 holder : holders) ++counts[holder];
            numbers.push_back(number);
        }
        CHECK(index.stats().blocks == blocks.size() && index.stats().holders == counts.size());
        for (const auto& [holder, count] : counts) CHECK(index.holder_blocks(holder) == count);
        Answer answer = index.lookup_sparse(packed(numbers), 0);
        CHECK(answer.hits == blocks.size());
        auto at = blocks.begin();
        for (u64 i = 0; i < answer.runs.size(); i += 3) {
            u32 number = answer.runs[i + 2];
            u64 start = number ? answer.sets.ends[number - 1] : 0;
            std::set<u32> holders(answer.sets.holders.begin() + static_cast<long>(start),
                                  answer.sets.holders.begin() + static_cast<long>(answer.sets.ends[number]));
            for (u32 n = 0; n < answer.runs[i + 1]; ++n, ++at) CHECK(at->second == holders);
        }
    }
    Fingerprints packed(const std::vector<u64>& numbers) const {
        return {reinterpret_cast<const u8*>(numbers.data()), numbers.size(), 8};
    }

    Index index;
    const u64 max_bytes;
    std::map<u64, std::set<u32>> blocks;
    u64 lost = 0;
};

std::vector<u64> batch(u64 range, u64 most) {
    std::vector<u64> numbers(1 + below(most));
    for (u64& number : numbers) number = below(range);
    std::sort(numbers.begin(), numbers.end());
    numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
    return numbers;
}

TEST(counts_answers_and_the_bound_hold_under_churn) {
    for (u64 seed = 1; seed <= 4; ++seed) {
        Bounded bounded(Index::kLeastBytes, seed);
        for (u32 step = 0; step < 600; ++step) {
            u32 holder = static_cast<u32>(below(6));
            switch (below(12)) {
                case 0: bounded.drop(holder); break;
                case 1: bounded.index.sweep(below(100)); break;
                case 2:
                case 3: bounded.remove(batch(20000, 200), holder); break;
                default: bounded.store(batch(20000, 1024), holder, step);
            }
            if (step % 20 == 0) bounded.compare();
        }
        bounded.compare();
        CHECK(bounded.lost > 1000);
    }
}

// Nearly every block has a set of its own, so that memory for sets runs out long before that for slots.
TEST(blocks_lose_holders_when_there_is_no_memory_for_their_sets) {
    for (u64 seed = 1; seed <= 3; ++seed) {
        Bounded bounded(Index::kLeastBytes, seed);
        for (u32 step = 0; step < 400; ++step) {
            u32 holder = static_cast<u32>(below(2000));
            if (below(4) == 0) {
                bounded.remove(batch(900, 300), static_cast<u32>(below(2000)));
            } else {
                bounded.store(batch(900, 300), holder, step);
            }
            if (step % 20 == 0) bounded.compare();
        }
        bounded.compare();
        CHECK(bounded.lost > 1000);
        for (u32 holder = 0; holder < 2000; ++holder) bounded.drop(holder);
        bounded.compare();
        bounded.store(batch(900, 300), 5, 1);
        bounded.compare();
    }
}

// A large bound is reached in steps whose last one leaves little unused, and never passed.
TEST(a_table_grows_up_to_its_bound_and_stays_there) {
    for (u64 bytes : {u64{200} << 10, u64{1} << 20, u64{5} << 20, u64{9} << 20, u64{23} << 20}) {
        Index index(0, 1, bytes);
        std::vector<u64> numbers(1024);
        u64 next = 0, most = 0;
        for (u64 stored = 0; stored < bytes / 10; stored += numbers.size()) {
            for (u64& number : numbers) number = next++;
            index.make_room(numbers.size(), 1);
            index.store({reinterpret_cast<const u8*>(numbers.data()), numbers.size(), 8}, 0, 1, static_cast<u32>(next), nullptr);
            most = std::max(most, index.stats().blocks);
            CHECK(index.stats().bytes <= bytes);
        }
        CHECK_SOUND(index);
        CHECK(most * 20 <= bytes && most * 36 >= bytes - (u64{64} << 10));
    }
    Index large(u64{1} << 24, 1, u64{1} << 20);
    CHECK(large.stats().bytes <= u64{1} << 20);
}

TEST(room_for_more_than_the_bound_is_refused_and_costs_nothing) {
    Index index(0, 1, Index::kLeastBytes);
    std::vector<u64> numbers(1024);
    for (u64 i = 0; i < numbers.size(); ++i) numbers[i] = i;
    index.make_room(1024, 1);
    index.store({reinterpret_cast<const u8*>(numbers.data()), 1024, 8}, 0, 1, 1, nullptr);
    bool refused = false;
    try {
        index.make_room(100000, 1);
    } catch (const std::bad_alloc&) {
        refused = true;
    }
    CHECK(refused && index.stats().blocks == 1024);
}

}  // namespace
