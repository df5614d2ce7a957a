// Invertible Bloom lookup table (IBLT) over a set of fingerprints, and an order-free digest of the same set.
//
//   cells     |  region 0  |  region 1  |  region 2  |  region 3  |     every item stands in one cell of each region
//   cell      | low 8 | high 8 | check 4 | count 4 |                    sums, modulo 2^64 and 2^32
//   item      first 16 bytes of a fingerprint as two little-endian u64 (8-byte fingerprints: high = 0)
//
//   encoded   | "KVSK" | version u16 | regions u16 | cells u32 | 0 u32 | count i64 | digest 16 | cells ... |
//
// Subtracting two tables leaves the difference of the sets: a cell with one item left (count +1 or -1, its check equal to
// the check of its sums) names that item, which is taken out of its other cells, and so on. With four regions this works
// up to 0.77 items a cell (Goodrich and Mitzenmacher 2011); 1,024 cells decode 700 items nearly always.
//
// The hashes are fixed, not seeded: both ends must agree on them, and an item that was made to collide costs its sender a
// snapshot. Invariants: the counts of each region sum to `count`, and so do the key sums of all regions to one value.
#pragma once

#include <vector>

#include "mix.hpp"

namespace kvdir {

struct Item {
    u64 low, high;
};
static_assert(sizeof(Item) == 16);

struct Cell {
    u64 low, high;
    u32 check, count;
};
static_assert(sizeof(Cell) == 24);

struct SketchHeader {
    u32 magic;
    u16 version;
    u16 regions;
    u32 cells;
    u32 reserved;
    u64 count;
    u64 digest[2];
};
static_assert(sizeof(SketchHeader) == 40);

struct Difference {
    std::vector<Item> here, there;
};

class Sketch {
public:
    static constexpr u32 kRegions = 4;
    static constexpr u32 kMinCells = 4;
    static constexpr u32 kMaxCells = u32{1} << 18;
    static constexpr u32 kMagic = 0x4B53564B;  // "KVSK", little-endian
    static constexpr u16 kVersion = 1;

    enum class Decoded { yes, too_large, wrong_size, wrong_version, damaged };

    explicit Sketch(u32 cells);  // a multiple of 4 between kMinCells and kMaxCells

    void insert(const Fingerprints& all) { apply_all(all, 1); }
    void remove(const Fingerprints& all) { apply_all(all, -1); }
    void insert_one(const u8* fingerprint, u32 width) { apply(item(fingerprint, width), 1); }
    void remove_one(const u8* fingerprint, u32 width) { apply(item(fingerprint, width), -1); }
    void clear();

    u64 count() const { return count_; }  // two's complement
    const u64* digest() const { return digest_; }
    u32 cells() const { return static_cast<u32>(cells_.size()); }

    // The same set in fewer cells: `cells` is a multiple of 4 that divides cells(). Places nest, because rounding down twice is
    // rounding down once: a cell of the smaller table is the sum of neighbours in this one.
    Sketch folded(u32 cells) const;

    u64 encoded_bytes() const { return sizeof(SketchHeader) + cells_.size() * sizeof(Cell); }
    void encode(u8* out) const;

    // Items only here and only in `other` (encoded). At most as many steps as there are cells, whatever the bytes say.
    Decoded difference(const u8* other, u64 bytes, Difference& out) const;

private:
    struct Hashes {
        u64 first, second;
    };

    static Item item(const u8* fingerprint, u32 width) {
        return {load_u64(fingerprint), width > 8 ? load_u64(fingerprint + 8) : 0};
    }
    static Hashes hashes_of(Item item) {
        return {scramble(item.low + scramble(item.high ^ kGolden)), scramble(item.high + scramble(item.low + kGolden))};
    }
    // 16 bits of the first hash per region; the check comes from the second, so it says nothing about the place.
    u32 cell_of(u64 first, u32 region) const {
        u64 bits = first >> (16 * region) & 0xFFFF;
        return region * region_cells_ + static_cast<u32>(bits * region_cells_ >> 16);
    }
    static u32 check_of(u64 second) { return static_cast<u32>(second >> 32); }

    void apply(Item item, int sign);
    void apply_all(const Fingerprints& all, int sign);
    bool pure(u32 cell, Item& item) const;
    bool consistent() const;
    bool peel(Difference& out);
    bool empty() const;

    std::vector<Cell> cells_;
    u32 region_cells_;
    u64 count_ = 0;
    u64 digest_[2] = {0, 0};  // sums of the two hashes over the items
};

}  // namespace kvdir
