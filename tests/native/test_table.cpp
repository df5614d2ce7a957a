// The ordered table against std::map, through every step of growth, with friendly and with hostile keys.
#include <map>

#include "check.hpp"
#include "table.hpp"

using namespace kvdir;

namespace {

struct Fixture {
    TableState state{};
    Region region{{4096, 4096, 4096, 4096, 4096, 4096, u64{1} << 30}};
    Table table{region, state};
    std::map<u64, u32> model;

    Fixture() { table.create(0); }

    void put(u64 key, u32 value) {
        table.reserve(1);
        Slot* slot = table.put(key);
        CHECK(slot->key == key);
        CHECK((slot->set == 0) == (model.count(key) == 0));
        slot->set = value;
        model[key] = value;
    }
    void erase(u64 key) {
        Slot* slot = table.find(key);
        CHECK((slot != nullptr) == (model.erase(key) == 1));
        if (slot) table.erase(table.index_of(slot));
    }
    void compare() const {
        CHECK_SOUND(table);
        CHECK(table.used() == model.size());
        u64 at = table.lower_bound(0);
        for (const auto& [key, value] : model) {  // both walk in key order
            CHECK(at < table.total());
            CHECK(table[at].key == key && table[at].set == value);
            CHECK(table.find(key) == &table[at]);
            CHECK(table.lower_bound(key) == at);
            at = table.skip_empty(at + 1);
        }
        CHECK(at == table.total());
    }
};

using MakeKey = u64 (*)();

void churn(MakeKey key, int steps, u64 put_of_ten, int compare_every) {
    Fixture fixture;
    for (int step = 1; step <= steps; ++step) {
        if (below(10) < put_of_ten || fixture.model.empty()) {
            fixture.put(key(), static_cast<u32>(step));
        } else if (below(4) == 0) {
            fixture.erase(key());
        } else {
            auto at = fixture.model.lower_bound(key());
            fixture.erase(at == fixture.model.end() ? fixture.model.begin()->first : at->first);
        }
        if (step % compare_every == 0) fixture.compare();
    }
    fixture.compare();
}

u64 spread() { return random_bits()() | 1; }
u64 at_the_bottom() { return below(3000) + 1; }                 // one cluster, all homes 0
u64 at_the_top() { return ~u64{0} - below(3000); }              // one cluster that runs off the end
u64 clustered() { return (below(40) << 58) + below(200) + 1; }  // a few very long clusters
u64 few() { return below(300) * 0x0123456789ABCDEF + 1; }       // the same keys again and again

TEST(every_step_of_growth_keeps_every_key) {
    Fixture fixture;
    for (u32 i = 1; i <= 3000; ++i) {
        fixture.put(spread(), i);
        fixture.compare();
    }
}

TEST(random_changes_agree_with_a_map) {
    churn(spread, 60000, 7, 500);
    churn(few, 20000, 5, 100);
}

TEST(hostile_keys_agree_with_a_map) {
    churn(at_the_bottom, 6000, 7, 100);
    churn(at_the_top, 6000, 7, 100);
    churn(clustered, 6000, 7, 100);
}

TEST(growing_and_shrinking_again_keeps_the_memory) {
    Fixture fixture;
    for (u32 i = 1; i <= 5000; ++i) fixture.put(spread(), i);
    u64 total = fixture.table.total();
    for (int round = 0; round < 5; ++round) {
        while (fixture.model.size() > 100) fixture.erase(fixture.model.begin()->first);
        fixture.compare();
        for (u32 i = 1; i <= 4500; ++i) fixture.put(spread(), i);
        fixture.compare();
    }
    CHECK(fixture.table.total() <= total * 3 / 2);
}

TEST(an_expected_size_is_reached_without_growth) {
    TableState state{};
    Region region{{4096, 4096, 4096, 4096, 4096, 4096, u64{1} << 30}};
    Table table{region, state};
    table.create(300000);
    u64 total = table.total();
    for (int i = 0; i < 300000; ++i) {
        table.reserve(1);
        table.put(spread())->set = 1;
    }
    CHECK(table.total() == total);
    CHECK_SOUND(table);
}

// The widest steps: whole huge pages, and several growths within one batch.
TEST(large_batches_grow_at_once) {
    Fixture fixture;
    for (u64 batch : {200, 5000, 100, 150000, 100000, 3}) {
        fixture.table.reserve(batch);
        for (u64 i = 0; i < batch; ++i) {
            u64 key = spread();
            fixture.table.put(key)->set = 7;
            fixture.model[key] = 7;
        }
        CHECK_SOUND(fixture.table);
    }
    fixture.compare();
}

TEST(nothing_is_lost_when_memory_is_exhausted) {
    TableState state{};
    Region region{{4096, 4096, 4096, 4096, 4096, 4096, Region::kHugePage}};
    Table table{region, state};
    table.create(0);
    std::map<u64, u32> model;
    bool full = false;
    while (!full) {
        u64 key = spread();
        try {
            table.reserve(1);
            table.put(key)->set = 1;
            model[key] = 1;
        } catch (const std::bad_alloc&) {
            full = true;
        }
    }
    CHECK(table.used() == model.size() && model.size() > 60000);
    CHECK_SOUND(table);
    for (const auto& [key, value] : model) CHECK(table.find(key) && table.find(key)->set == value);
}

}  // namespace
