// The file that a region lies in: who may write it, when it can be seen, and what becomes of it.
//
//   PATH        the region that readers open; always whole, because it comes here by rename
//   PATH.new    the one that is being made; a dead writer's is replaced
//   PATH.lock   held (flock) by the writer for as long as it lives; removed by it, a killed one's stays for the next
//
// Rules: one writer a path, and the kernel says whether it lives. A region is never taken over: what a dead writer left may end
// in the middle of a section, so a new writer makes a new file and marks the old one retired. A file's size never changes
// once it can be seen. A writer that ends takes its file along: shared memory that nobody keeps up to date is only in the way.
// What is at PATH and no region is not touched. A fork cannot write, but keeps the lock of a writer that was killed.
#pragma once

#include <sys/types.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "region.hpp"

namespace kvdir {

// The message says what to do.
struct RegionError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class FileLock;

struct RegionPlace {
    std::string path;
    std::string release;  // of the writer, for errors of others
    u32 mode = 0600;
    u64 max_bytes = 0;
    std::shared_ptr<FileLock> lock;  // of a predecessor at the same path; null: take it
};

class RegionFile {
public:
    explicit RegionFile(const RegionPlace& place);  // PATH.new, empty
    ~RegionFile() { close(); }
    RegionFile(const RegionFile&) = delete;
    RegionFile& operator=(const RegionFile&) = delete;

    int fd() const { return fd_; }
    const RegionPlace& place() const { return place_; }  // with the lock, for a successor
    bool created_here() const;  // false in a fork of the writer

    void sign(RegionHeader& header) const;  // who wrote this, and which it is
    void publish();  // to PATH; what was there is retired
    void close() noexcept;  // takes the file away, and the lock with the last file of this path
    std::string no_room() const;

private:
    bool is_ours(const std::string& name) const;  // the file of that name is this one
    void withdraw() noexcept;
    std::string fresh_path() const { return place_.path + ".new"; }

    RegionPlace place_;
    int fd_ = -1;
    pid_t pid_;
    bool published_ = false;
};

// Hash of the sizes of everything in a region: another one means other code. What changes its meaning and not its size needs
// another Region::kVersion.
u64 region_layout();
std::string boot_id();

}  // namespace kvdir
