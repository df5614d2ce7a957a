#include "sketch.hpp"

#include <algorithm>
#include <cstring>

namespace kvdir {

Sketch::Sketch(u32 cells) : cells_(cells), region_cells_(cells / kRegions) {}

void Sketch::clear() {
    std::fill(cells_.begin(), cells_.end(), Cell{});
    count_ = digest_[0] = digest_[1] = 0;
}

void Sketch::apply(Item item, int sign) {
    Hashes hashes = hashes_of(item);
    u64 factor = static_cast<u64>(static_cast<std::int64_t>(sign));  // adding or subtracting, modulo 2^64
    u32 factor32 = static_cast<u32>(factor);
    Item term{item.low * factor, item.high * factor};
    u32 check = check_of(hashes.second) * factor32;
    for (u32 region = 0; region < kRegions; ++region) {
        Cell& cell = cells_[cell_of(hashes.first, region)];
        cell.low += term.low;
        cell.high += term.high;
        cell.check += check;
        cell.count += factor32;
    }
    count_ += factor;
    digest_[0] += hashes.first * factor;
    digest_[1] += hashes.second * factor;
}

void Sketch::apply_all(const Fingerprints& all, int sign) {
    for (u64 i = 0; i < all.count; ++i) apply(item(all.at(i), all.width), sign);
}

Sketch Sketch::folded(u32 cells) const {
    Sketch out(cells);
    u32 neighbours = this->cells() / cells;
    for (u32 i = 0; i < this->cells(); ++i) {
        Cell& cell = out.cells_[i / neighbours];
        cell.low += cells_[i].low;
        cell.high += cells_[i].high;
        cell.check += cells_[i].check;
        cell.count += cells_[i].count;
    }
    out.count_ = count_;
    out.digest_[0] = digest_[0];
    out.digest_[1] = digest_[1];
    return out;
}

void Sketch::encode(u8* out) const {
    SketchHeader header{kMagic, kVersion, kRegions, cells(), 0, count_, {digest_[0], digest_[1]}};
    std::memcpy(out, &header, sizeof header);
    std::memcpy(out + sizeof header, cells_.data(), cells_.size() * sizeof(Cell));
}

// Whether the cell holds one item: then its sums are that item, up to the sign.
bool Sketch::pure(u32 index, Item& item) const {
    const Cell& cell = cells_[index];
    if (cell.count != 1 && cell.count != ~u32{0}) return false;
    bool positive = cell.count == 1;
    item = positive ? Item{cell.low, cell.high} : Item{-cell.low, -cell.high};
    Hashes hashes = hashes_of(item);
    u32 check = positive ? cell.check : -cell.check;
    return check == check_of(hashes.second) && cell_of(hashes.first, index / region_cells_) == index;
}

// Every item stands once in each region, so all regions have the same sums.
bool Sketch::consistent() const {
    Cell first{};
    for (u32 region = 0; region < kRegions; ++region) {
        Cell sum{};
        for (u32 i = region * region_cells_; i < (region + 1) * region_cells_; ++i) {
            sum.low += cells_[i].low;
            sum.high += cells_[i].high;
            sum.check += cells_[i].check;
            sum.count += cells_[i].count;
        }
        if (region == 0) first = sum;
        if (std::memcmp(&first, &sum, sizeof sum) != 0) return false;
    }
    return first.count == static_cast<u32>(count_);
}

bool Sketch::empty() const {
    return count_ == 0 && digest_[0] == 0 && digest_[1] == 0 && std::all_of(cells_.begin(), cells_.end(), [](const Cell& cell) {
        return cell.low == 0 && cell.high == 0 && cell.check == 0 && cell.count == 0;
    });
}

// Takes items out until no cell names one. Each success removes one item, and no honest difference has more items than
// cells, so more successes than that mean garbage.
bool Sketch::peel(Difference& out) {
    std::vector<u32> candidates(cells());
    for (u32 i = 0; i < cells(); ++i) candidates[i] = i;
    while (!candidates.empty()) {
        u32 index = candidates.back();
        candidates.pop_back();
        Item item;
        if (!pure(index, item)) continue;
        bool here = cells_[index].count == 1;
        if (out.here.size() + out.there.size() == cells()) return false;
        (here ? out.here : out.there).push_back(item);
        apply(item, here ? -1 : 1);
        u64 first = hashes_of(item).first;
        for (u32 region = 0; region < kRegions; ++region) candidates.push_back(cell_of(first, region));
    }
    return empty();
}

Sketch::Decoded Sketch::difference(const u8* other, u64 bytes, Difference& out) const {
    SketchHeader header;
    if (bytes < sizeof header) return Decoded::damaged;
    std::memcpy(&header, other, sizeof header);
    if (header.magic != kMagic || header.reserved != 0) return Decoded::damaged;
    if (header.version != kVersion || header.regions != kRegions) return Decoded::wrong_version;
    if (header.cells != cells()) return Decoded::wrong_size;
    if (bytes != encoded_bytes()) return Decoded::damaged;

    Sketch theirs(cells());
    std::memcpy(theirs.cells_.data(), other + sizeof header, cells_.size() * sizeof(Cell));
    theirs.count_ = header.count;
    if (!theirs.consistent()) return Decoded::damaged;

    Sketch rest = *this;
    for (u32 i = 0; i < cells(); ++i) {
        rest.cells_[i].low -= theirs.cells_[i].low;
        rest.cells_[i].high -= theirs.cells_[i].high;
        rest.cells_[i].check -= theirs.cells_[i].check;
        rest.cells_[i].count -= theirs.cells_[i].count;
    }
    rest.count_ -= header.count;
    rest.digest_[0] -= header.digest[0];
    rest.digest_[1] -= header.digest[1];
    return rest.peel(out) ? Decoded::yes : Decoded::too_large;
}

}  // namespace kvdir
