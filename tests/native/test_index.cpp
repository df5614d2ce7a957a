// The whole core against a map of sets: random batches, drops, sweeps and holder numbers used again.
#include <algorithm>
#include <map>
#include <set>

#include "check.hpp"
#include "index.hpp"

using namespace kvdir;

namespace {

using Holders = std::set<u32>;
using Block = std::pair<u64, u64>;  // scope, fingerprint

Holders holders_of(const SetList& sets, u32 number) {
    u64 start = number ? sets.ends[number - 1] : 0;
    Holders holders(sets.holders.begin() + static_cast<long>(start), sets.holders.begin() + static_cast<long>(sets.ends[number]));
    CHECK(holders.size() == sets.ends[number] - start && !holders.empty());
    return holders;
}

// One packed batch of fingerprints whose first 8 bytes are the given numbers.
struct Packed {
    Packed(const std::vector<u64>& numbers, u32 width) : bytes(numbers.size() * width), width(width) {
        for (u64 i = 0; i < numbers.size(); ++i) std::memcpy(&bytes[i * width], &numbers[i], 8);
    }
    Fingerprints operator*() const { return {bytes.data(), bytes.size() / width, width}; }
    std::vector<u8> bytes;
    u32 width;
};

struct Model {
    explicit Model(u64 seed) : index(0, seed) {}

    void store(const std::vector<u64>& numbers, u64 scope, u32 holder, u32 width, bool with_sketch) {
        Packed batch(numbers, width);
        u64 added = 0;
        for (u64 number : numbers) {
            if (!blocks[{scope, number}].insert(holder).second) continue;
            ++added;
            if (with_sketch) expected.insert(*Packed({number}, width));
        }
        CHECK(index.store(*batch, scope, holder, 1, with_sketch ? &sketch : nullptr) == added);
    }
    void remove(const std::vector<u64>& numbers, u64 scope, u32 holder, u32 width, bool with_sketch) {
        Packed batch(numbers, width);
        u64 removed = 0;
        for (u64 number : numbers) {
            auto at = blocks.find({scope, number});
            if (at == blocks.end() || at->second.erase(holder) == 0) continue;
            if (at->second.empty()) blocks.erase(at);
            ++removed;
            if (with_sketch) expected.remove(*Packed({number}, width));
        }
        CHECK(index.remove(*batch, scope, holder, with_sketch ? &sketch : nullptr) == removed);
    }
    void drop(u32 holder) {
        u64 lost = 0;
        for (auto at = blocks.begin(); at != blocks.end();) {
            lost += at->second.erase(holder);
            at = at->second.empty() ? blocks.erase(at) : std::next(at);
        }
        CHECK(index.drop(holder) == lost);
    }
    const Holders* find(u64 scope, u64 number) const {
        auto at = blocks.find({scope, number});
        return at == blocks.end() ? nullptr : &at->second;
    }

    void compare() const {
        CHECK_SOUND(index);
        Stats stats = index.stats();
        std::set<Holders> sets;
        std::map<u32, u64> counts;
        for (const auto& [block, holders] : blocks) {
            sets.insert(holders);
            for (u32 holder : holders) ++counts[holder];
        }
        CHECK(stats.blocks == blocks.size() && stats.sets == sets.size() && stats.holders == counts.size());
        for (const auto& [holder, count] : counts) CHECK(index.holder_blocks(holder) == count);
        std::vector<u8> ours(sketch.encoded_bytes()), theirs(ours.size());
        sketch.encode(ours.data()), expected.encode(theirs.data());
        CHECK(ours == theirs);
        compare_dump();
    }
    void compare_dump() const {
        std::map<u64, Holders> by_key;
        for (const auto& [block, holders] : blocks) {
            u64 key;
            index.keys(*Packed({block.second}, 8), block.first, &key);
            by_key[key] = holders;
        }
        std::map<u64, Holders> dumped;
        u64 cursor = 0;
        do {
            DumpPage page = index.dump(cursor, 1 + below(500));
            for (u64 i = 0; i < page.keys.size(); ++i) {
                CHECK(dumped.emplace(page.keys[i], holders_of(page.sets, page.numbers[i])).second);
            }
            cursor = page.next;
        } while (cursor);
        CHECK(dumped == by_key);
    }
    void compare_sparse(const std::vector<u64>& numbers, u64 scope) const {
        Answer answer = index.lookup_sparse(*Packed(numbers, 16), scope);
        u64 position = 0, hits = 0;
        Holders previous;
        for (u64 i = 0; i < answer.runs.size(); i += 3) {
            u32 start = answer.runs[i], count = answer.runs[i + 1];
            for (; position < start; ++position) CHECK(!find(scope, numbers[position]));
            Holders holders = holders_of(answer.sets, answer.runs[i + 2]);
            CHECK(count > 0 && (i == 0 || start > answer.runs[i - 3] + answer.runs[i - 2] || holders != previous));
            for (; position < start + count; ++position) {
                CHECK(find(scope, numbers[position]) && *find(scope, numbers[position]) == holders);
            }
            hits += count;
            previous = holders;
        }
        for (; position < numbers.size(); ++position) CHECK(!find(scope, numbers[position]));
        CHECK(answer.hits == hits);
    }

    Index index;
    Sketch sketch{64}, expected{64};
    std::map<Block, Holders> blocks;
};

std::vector<u64> batch(u64 range, u64 most) {
    std::vector<u64> numbers(below(most + 1));
    bool run = below(2);
    u64 first = below(range);
    for (u64 i = 0; i < numbers.size(); ++i) numbers[i] = run ? (first + i) % range : below(range);
    return numbers;
}

void churn(u64 seed, u64 range, u64 most, u32 holders, int steps) {
    Model model(seed);
    constexpr u32 widths[] = {8, 16, 32};
    for (int step = 0; step < steps; ++step) {
        u64 scope = below(2);
        u32 holder = static_cast<u32>(below(holders));
        u32 width = widths[below(3)];
        switch (below(12)) {
            case 0: model.drop(holder); break;
            case 1: model.index.sweep(below(100)); break;
            case 2:
            case 3:
            case 4: model.remove(batch(range, most), scope, holder, width, below(2)); break;
            case 5: model.compare_sparse(batch(range, most), scope); break;
            default: model.store(batch(range, most), scope, holder, width, below(2));
        }
        if (step % 20 == 0) model.compare();
    }
    model.compare();
    for (u32 holder = 0; holder < holders; ++holder) model.drop(holder);
    model.compare();
    model.index.sweep(~u64{0});
    model.compare();
    CHECK(model.index.lookup_sparse(*Packed(batch(range, most), 8), 0).hits == 0);
}

TEST(random_batches_agree_with_a_map_of_sets) {
    for (u64 seed = 1; seed <= 6; ++seed) churn(seed, 300, 40, 5, 1500);
    churn(7, 3000, 200, 30, 1200);
    churn(8, 20000, 3000, 6, 250);
}

// Few blocks, many holders, constant drops: aliases, aliases of aliases, and sets that die while only aliases name them.
TEST(drops_of_every_holder_again_and_again) {
    for (u64 seed = 1; seed <= 5; ++seed) {
        Model model(seed);
        for (int step = 0; step < 3000; ++step) {
            u32 holder = static_cast<u32>(below(8));
            if (below(4) == 0) {
                model.drop(holder);
            } else if (below(5) == 0) {
                model.remove(batch(40, 10), 0, holder, 8, false);
            } else {
                model.store(batch(40, 10), 0, holder, 8, false);
            }
            if (step % 10 == 0) model.compare();
        }
    }
}

TEST(prefix_lookups_are_exact_where_sets_change_once) {
    Model model(3);
    std::vector<u64> chain(1000);
    for (u64 i = 0; i < chain.size(); ++i) chain[i] = i * i + 1;
    for (int trial = 0; trial < 200; ++trial) {
        for (u32 holder = 0; holder < 5; ++holder) model.drop(holder);
        u64 longest = 0;
        for (u32 holder = 0; holder < 5; ++holder) {
            std::vector<u64> head(chain.begin(), chain.begin() + static_cast<long>(below(chain.size() + 1)));
            longest = std::max<u64>(longest, head.size());
            model.store(head, 0, holder, 8, false);
        }
        u64 asked = below(chain.size() + 1);
        std::vector<u64> question(chain.begin(), chain.begin() + static_cast<long>(asked));
        Answer prefix = model.index.lookup_prefix(*Packed(question, 32), 0);
        Answer sparse = model.index.lookup_sparse(*Packed(question, 32), 0);
        CHECK(prefix.hits == std::min(asked, longest) && prefix.runs == sparse.runs);
        CHECK(prefix.sets.holders == sparse.sets.holders);
    }
}

// Every block has its own set, sets grow to 64 holders and shrink again: nothing may be left over.
TEST(hostile_sets_leave_no_memory_behind) {
    Index index(0, 1);
    std::vector<u64> numbers(2000);
    for (u64 i = 0; i < numbers.size(); ++i) numbers[i] = i;
    u64 bytes = 0;
    for (int round = 0; round < 6; ++round) {
        for (u32 holder = 0; holder < 64; ++holder) {
            std::vector<u64> some;
            for (u64 number : numbers) {
                if (random_bits()() >> 63) some.push_back(number);
            }
            index.store(*Packed(some, 8), 0, holder, 1, nullptr);
        }
        CHECK_SOUND(index);
        if (round % 2) {
            for (u32 holder = 0; holder < 64; ++holder) index.drop(holder);
        } else {
            for (u32 holder = 0; holder < 64; ++holder) index.remove(*Packed(numbers, 8), 0, holder, nullptr);
        }
        CHECK(index.stats().blocks == 0 && index.stats().sets == 0);
        index.sweep(~u64{0});
        CHECK_SOUND(index);
        if (round == 1) bytes = index.stats().bytes;
    }
    CHECK(index.stats().bytes <= bytes + bytes / 10);
}

TEST(last_access_is_the_newest_and_starts_again_after_a_drop) {
    Index index(0, 1);
    Packed one({42}, 8);
    u32 access = 0;
    index.store(*one, 0, 1, 100, nullptr);
    index.store(*one, 0, 2, 50, nullptr);
    index.last_access(*one, 0, &access);
    CHECK(access == 100);
    index.touch(*one, 0, 200);
    index.last_access(*one, 0, &access);
    CHECK(access == 200);
    index.drop(1), index.drop(2);
    index.last_access(*one, 0, &access);
    CHECK(access == 0);
    index.store(*one, 0, 1, 7, nullptr);
    index.last_access(*one, 0, &access);
    CHECK(access == 7);
}

}  // namespace
