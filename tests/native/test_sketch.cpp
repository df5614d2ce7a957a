// The sketch: exact differences up to its capacity, and an end in bounded time whatever the other side sends.
#include <algorithm>
#include <cstring>
#include <set>

#include "check.hpp"
#include "sketch.hpp"

using namespace kvdir;

namespace {

using Bytes = std::vector<u8>;
using Items = std::set<std::pair<u64, u64>>;

Bytes random_items(u64 count, u32 width = 16) {
    Bytes bytes(count * width);
    for (auto& byte : bytes) byte = static_cast<u8>(random_bits()());
    return bytes;
}

Fingerprints packed(const Bytes& bytes, u32 width = 16) { return {bytes.data(), bytes.size() / width, width}; }

Bytes encoded(const Sketch& sketch) {
    Bytes out(sketch.encoded_bytes());
    sketch.encode(out.data());
    return out;
}

Sketch::Decoded subtract(const Sketch& here, const Bytes& there, Difference& out) {
    out = {};
    return here.difference(there.data(), there.size(), out);
}

Items items_of(const std::vector<Item>& items) {
    Items set;
    for (Item item : items) set.insert({item.low, item.high});
    CHECK(set.size() == items.size());
    return set;
}

Items items_of(const Bytes& bytes) {
    Items set;
    for (u64 i = 0; i < bytes.size(); i += 16) set.insert({load_u64(&bytes[i]), load_u64(&bytes[i + 8])});
    return set;
}

TEST(a_folded_sketch_equals_one_of_that_size_and_decodes_less) {
    Bytes common = random_items(3000), left = random_items(20), right = random_items(20);
    Sketch here(1024), there(1024), small(128);
    here.insert(packed(common)), there.insert(packed(common)), small.insert(packed(common));
    here.insert(packed(left)), there.insert(packed(right)), small.insert(packed(left));
    for (u32 cells : {4u, 128u, 512u, 1024u}) CHECK(here.folded(cells).encoded_bytes() == Sketch(cells).encoded_bytes());
    CHECK(encoded(here.folded(128)) == encoded(small));
    Difference difference;
    CHECK(subtract(here.folded(128), encoded(there.folded(128)), difference) == Sketch::Decoded::yes);
    CHECK(items_of(difference.here) == items_of(left) && items_of(difference.there) == items_of(right));
    CHECK(subtract(here.folded(4), encoded(there.folded(4)), difference) == Sketch::Decoded::too_large);
    CHECK(subtract(here.folded(128), encoded(there), difference) == Sketch::Decoded::wrong_size);
}

TEST(seven_hundred_differences_decode_in_199_of_200_trials) {
    int good = 0;
    for (int trial = 0; trial < 200; ++trial) {
        Bytes common = random_items(5000), left = random_items(350), right = random_items(350);
        Sketch here(1024), there(1024);
        here.insert(packed(common)), there.insert(packed(common));
        here.insert(packed(left)), there.insert(packed(right));
        Difference difference;
        if (subtract(here, encoded(there), difference) != Sketch::Decoded::yes) continue;
        CHECK(items_of(difference.here) == items_of(left) && items_of(difference.there) == items_of(right));
        ++good;
    }
    CHECK(good >= 199);
}

TEST(a_difference_too_large_is_said_to_be_so) {
    for (u64 extra : {1000, 5000, 100000}) {
        Sketch here(1024), there(1024);
        here.insert(packed(random_items(extra)));
        Difference difference;
        CHECK(subtract(here, encoded(there), difference) == Sketch::Decoded::too_large);
    }
}

TEST(order_and_detours_do_not_matter) {
    Bytes all = random_items(500, 32), gone = random_items(100, 32);
    Sketch one(1024), two(1024);
    one.insert(packed(all, 32));
    two.insert(packed(gone, 32));
    for (u64 i = 500; i-- > 0;) two.insert_one(&all[i * 32], 32);
    two.remove(packed(gone, 32));
    CHECK(encoded(one) == encoded(two));
    one.remove(packed(all, 32));
    CHECK(encoded(one) == encoded(Sketch(1024)));
}

// Removing what was never there is a difference like any other.
TEST(negative_counts_decode) {
    Sketch here(64), there(64);
    Bytes lost = random_items(10);
    here.remove(packed(lost));
    Difference difference;
    CHECK(subtract(here, encoded(there), difference) == Sketch::Decoded::yes);
    CHECK(difference.here.empty() && items_of(difference.there) == items_of(lost));
}

TEST(garbage_ends_and_is_refused) {
    Sketch here(1024);
    here.insert(packed(random_items(300)));
    Bytes good = encoded(here);
    Difference difference;
    CHECK(subtract(here, {}, difference) == Sketch::Decoded::damaged);
    for (u64 cut : {1, 39, 40, 41, 24000}) {
        CHECK(subtract(here, Bytes(good.begin(), good.begin() + static_cast<long>(cut)), difference) == Sketch::Decoded::damaged);
    }
    for (int trial = 0; trial < 2000; ++trial) {
        Bytes bad = good;
        bad[below(bad.size())] ^= static_cast<u8>(1 + below(255));
        CHECK(subtract(here, bad, difference) != Sketch::Decoded::yes);
    }
    for (int trial = 0; trial < 200; ++trial) {  // random cells under an honest header
        Bytes bad = good;
        for (u64 i = sizeof(SketchHeader); i < bad.size(); ++i) bad[i] = static_cast<u8>(random_bits()());
        CHECK(subtract(here, bad, difference) == Sketch::Decoded::damaged);
    }
    CHECK(subtract(here, encoded(Sketch(512)), difference) == Sketch::Decoded::wrong_size);
    Bytes newer = good;
    newer[4] = 2;
    CHECK(subtract(here, newer, difference) == Sketch::Decoded::wrong_version);
}

// Cells that are consistent in sum and full of items that check, but that no set of items would give.
TEST(hostile_cells_end) {
    Sketch here(64);
    for (int trial = 0; trial < 200; ++trial) {
        Bytes bad = encoded(here);
        std::vector<Cell> cells(64);
        u64 count = 0;
        for (int i = 0; i < 40; ++i) {
            Sketch one(64);
            one.insert(packed(random_items(1)));
            Bytes bytes = encoded(one);
            std::vector<Cell> theirs(64);
            std::memcpy(theirs.data(), &bytes[sizeof(SketchHeader)], 64 * sizeof(Cell));
            u64 turn = below(16);
            for (u64 k = 0; k < 64; ++k) {  // every region rotated by itself: sums stay, places do not
                u64 to = k / 16 * 16 + (k + turn) % 16;
                cells[to].low += theirs[k].low, cells[to].high += theirs[k].high;
                cells[to].check += theirs[k].check, cells[to].count += theirs[k].count;
            }
            ++count;
        }
        std::memcpy(&bad[sizeof(SketchHeader)], cells.data(), 64 * sizeof(Cell));
        std::memcpy(&bad[16], &count, sizeof count);
        Difference difference;
        CHECK(subtract(here, bad, difference) == Sketch::Decoded::too_large);
    }
}

}  // namespace
