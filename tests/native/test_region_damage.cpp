// No content of a region, however it came about, makes a reader crash, stay, or read beyond what is mapped.
#include <fcntl.h>
#include <sys/stat.h>

#include <chrono>

#include "region_fixture.hpp"

namespace {

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

constexpr u64 kLarge[] = {~u64{0}, u64{1} << 63, 0x4000000040000000, 0x0001000000010000, 0x0000010000000100};

// Words become others as soon as they were read, until the reader asks whether anything was written. Whoever reads one again is led
// astray: out of the mapping, or to a gap of the file, which tmpfs then fills.
struct Fickle {
    Fickle(Damaged& damaged, const RegionView& view, u64 odds)
        : base(damaged.base), seen(view.at<u8>(Segment::header)), odds(odds) {
        fickle = this;
        peek_hook = [](const void* place) { fickle->change(static_cast<const u8*>(place)); };
    }
    ~Fickle() {
        peek_hook = nullptr;
        undo();
    }
    void change(const u8* place) {
        u64 at = static_cast<u64>(place - seen) & ~u64{7};
        if (at == offsetof(RegionHeader, sequence)) return undo();
        if (below(odds)) return;
        u64* word = reinterpret_cast<u64*>(base + at);
        changed.push_back({word, *word});
        *word = kLarge[below(std::size(kLarge))];
    }
    void undo() {
        for (auto at = changed.rbegin(); at != changed.rend(); ++at) *at->first = at->second;
        changed.clear();
    }
    static inline Fickle* fickle = nullptr;
    u8* base;
    const u8* seen;
    u64 odds;  // one word in so many
    std::vector<std::pair<u64*, u64>> changed;
};

TEST(contents_that_change_once_they_were_read_lead_no_reader_astray) {
    Damaged damaged;
    RegionView view(damaged.place.place.path);
    auto allocated = [&] {
        struct stat status{};
        CHECK(stat(damaged.place.place.path.c_str(), &status) == 0);
        return status.st_blocks;
    };
    const auto before = allocated();
    u64 hits = 0;
    for (int round = 0; round < 700; ++round) {
        Fickle fickle(damaged, view, u64{1} << (round % 14));
        std::string out;
        std::vector<u64> question(700);
        for (u64& number : question) number = 1 + below(5000);
        for (bool prefix : {false, true}) hits += region_lookup(view, *Packed(question), 0, prefix).hits;
        view.sheet(Segment::beat, 0, kBeatBytes, out), fickle.undo();
        view.sheet(Segment::namespaces, 0, kNamespaceBytes, out), fickle.undo();
        view.node(0, out), fickle.undo();
        view.node(70000, out), fickle.undo();
        CHECK(view.nodes().size() <= kNodeLimit);
        CHECK(allocated() == before);
    }
    CHECK(hits > 1000);
    CHECK_SOUND(*damaged.index);
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
}  // namespace
