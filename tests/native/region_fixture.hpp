// What the tests of regions share: a path of their own, packed blocks, and an answer unfolded.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>

#include "check.hpp"
#include "view.hpp"

using namespace kvdir;

using Named = std::set<std::pair<u32, u32>>;  // (node id, tier)

inline std::string fresh_path() {
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
inline std::vector<Named> named(const RegionAnswer& answer, u64 asked) {
    std::vector<Named> out(asked);
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
