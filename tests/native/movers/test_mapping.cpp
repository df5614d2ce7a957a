// Mappings of files: where they lie, that all of them is there after prefault, and what a node or a hole does to them.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <system_error>

#include "../check.hpp"
#include "mapping.hpp"
#include "net.hpp"

using namespace kvdir;

namespace {

Fd file_of(size_t bytes) {
    Fd fd(memfd_create("mapping", MFD_CLOEXEC));
    CHECK(fd && ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0);
    return fd;
}

size_t resident_pages(const Mapping& mapping) {
    std::vector<unsigned char> pages((mapping.bytes() + 4095) / 4096);
    CHECK(mincore(mapping.data(), mapping.bytes(), pages.data()) == 0);
    size_t count = 0;
    for (const unsigned char page : pages) count += page & 1;
    return count;
}

template <typename Body>
bool fails(Body body) {
    try {
        body();
    } catch (const std::system_error&) {
        return true;
    }
    return false;
}

}  // namespace

TEST(mappings_lie_where_huge_pages_can_and_show_the_file) {
    for (const size_t bytes : {size_t{1}, size_t{4096}, size_t{4097}, kHugeBytes, 3 * kHugeBytes + 5000}) {
        const Fd fd = file_of(bytes);
        Mapping writer(fd.get(), bytes, true), reader(fd.get(), bytes, false);
        CHECK(reinterpret_cast<uintptr_t>(writer.data()) % kHugeBytes == 0);
        CHECK(writer.bytes() >= bytes && writer.bytes() - bytes < writer.page_bytes());
        writer.data()[bytes - 1] = 42;
        CHECK(reader.data()[bytes - 1] == 42);
    }
}

TEST(everything_is_there_after_prefault_whatever_the_threads) {
    for (const bool huge : {false, true}) {
        for (const unsigned threads : {0U, 1U, 3U}) {
            const size_t bytes = (150 << 20) + 4096 * below(600);  // enough for more than one thread, and a tail
            const Fd fd = file_of(bytes);
            Mapping mapping(fd.get(), bytes, true);
            mapping.advise_huge(huge);
            mapping.prefault(huge, threads);
            CHECK(resident_pages(mapping) == (mapping.bytes() + 4095) / 4096);
            for (size_t at = 0; at < bytes; at += 4096) CHECK(mapping.data()[at] == 0);
        }
    }
}

TEST(a_node_that_is_not_there_is_an_error) {
    const Fd fd = file_of(kHugeBytes);
    Mapping mapping(fd.get(), kHugeBytes, true);
    for (const int node : {-1, 777, 1 << 20}) CHECK(fails([&] { mapping.bind(node); }));
    mapping.prefault(true, 1);
    CHECK(mapping.data()[kHugeBytes - 1] == 0);
}

TEST(removed_memory_is_gone_for_everyone_and_what_lies_before_stays) {
    const size_t bytes = 5 * kHugeBytes;
    const Fd fd = file_of(bytes);
    Mapping mapping(fd.get(), bytes, true), other(fd.get(), bytes, false);
    std::memset(mapping.data(), 7, bytes);
    mapping.remove(4096);
    CHECK(other.data()[4095] == 7 && other.data()[4096] == 0 && other.data()[bytes - 1] == 0);
    mapping.remove(bytes);  // nothing is behind the end
}

TEST(files_that_cannot_be_mapped_are_errors) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    const Fd in(ends[0]), out(ends[1]);
    CHECK(fails([&] { Mapping mapping(in.get(), 4096, false); }));
    CHECK(fails([] { Mapping mapping(-1, 4096, false); }));
    const Fd fd = file_of(4096);
    CHECK(fails([&] { Mapping mapping(fd.get(), SIZE_MAX / 2, false); }));
}
