#include "region_file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "index.hpp"
#include "roster.hpp"

namespace kvdir {

namespace {

std::string why(int error) { return std::strerror(error); }

bool is_same_file(int fd, const std::string& name) {
    struct stat open{}, there{};
    return fstat(fd, &open) == 0 && lstat(name.c_str(), &there) == 0 && open.st_ino == there.st_ino && open.st_dev == there.st_dev;
}

std::string read_text(const char* path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return "";
    char text[1024];
    ssize_t bytes = read(fd, text, sizeof text);
    close(fd);
    return bytes > 0 ? std::string(text, static_cast<std::size_t>(bytes)) : "";
}

// Field 22 of /proc/self/stat; the name in field 2 may hold anything, so count behind its last bracket.
u64 start_ticks() {
    std::string stat = read_text("/proc/self/stat");
    std::size_t at = stat.rfind(')');
    for (int field = 2; field < 22 && at != std::string::npos; ++field) at = stat.find(' ', at + 1);
    return at == std::string::npos ? 0 : std::strtoull(stat.c_str() + at, nullptr, 10);
}

u64 random_number() {
    u64 value = 0;
    while (value == 0) {
        if (getrandom(&value, sizeof value, 0) < 0 && errno != EINTR) throw RegionError("the system gives no random numbers");
    }
    return value;
}

// A region at the path, opened for writing: to retire it. -1 when there is nothing. Throws for anything else.
int open_predecessor(const std::string& path) {
    int fd = open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0 && errno == ENOENT) return -1;
    if (fd < 0) throw RegionError("cannot replace " + path + ": " + why(errno) + "; remove it, or give another path");
    u64 magic = 0;
    struct stat status{};
    bool ours = fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
                (status.st_size == 0 || (pread(fd, &magic, sizeof magic, 0) == sizeof magic && magic == Region::kMagic));
    if (ours) return fd;
    close(fd);
    throw RegionError(path + " exists and is not a region: remove it, or give another path");
}

}  // namespace

// Removed by its holder while still held. So whoever opened it before and gets it after holds a file without a name, which
// locks nothing: only the file that has the name counts.
class FileLock {
public:
    explicit FileLock(const std::string& path) : name_(path + ".lock"), pid_(getpid()) {
        do {
            take(path);
        } while (!named());
        std::string pid = std::to_string(pid_) + "\n";
        if (ftruncate(fd_, 0) == 0 && pwrite(fd_, pid.data(), pid.size(), 0) < 0) errno = 0;  // only for error messages
    }
    ~FileLock() {
        if (getpid() == pid_ && named()) unlink(name_.c_str());
        close(fd_);
    }
    FileLock(const FileLock&) = delete;
    FileLock& operator=(const FileLock&) = delete;

private:
    void take(const std::string& path) {
        if (fd_ >= 0) close(fd_);
        fd_ = open(name_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fd_ < 0) {
            throw RegionError("cannot lock " + name_ + ": " + why(errno) + "; the directory must exist and be writable for this user");
        }
        if (flock(fd_, LOCK_EX | LOCK_NB) == 0) return;
        char text[32] = {};
        if (pread(fd_, text, sizeof text - 1, 0) < 0) text[0] = 0;
        close(fd_);
        text[std::strcspn(text, "\n")] = 0;
        throw RegionError("region " + path + " has a writer already (process " + (text[0] ? text : "unknown") +
                          "): stop it, or give this one another path");
    }

    bool named() const { return is_same_file(fd_, name_); }

    std::string name_;
    pid_t pid_;
    int fd_ = -1;
};

RegionFile::RegionFile(const RegionPlace& place) : place_(place), pid_(getpid()) {
    if (!place_.lock) place_.lock = std::make_shared<FileLock>(place_.path);
    int predecessor = open_predecessor(place_.path);  // before any work
    if (predecessor >= 0) ::close(predecessor);
    std::string fresh = fresh_path();
    unlink(fresh.c_str());
    fd_ = open(fresh.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, place_.mode);
    if (fd_ < 0) throw RegionError("cannot create " + fresh + ": " + why(errno));
    if (fchmod(fd_, place_.mode) == 0) return;  // whatever the umask
    int error = errno;
    close();
    throw RegionError("cannot set the mode of " + fresh + ": " + why(error));
}

void RegionFile::close() noexcept {
    if (fd_ < 0) return;
    if (created_here()) withdraw();
    ::close(fd_);
    fd_ = -1;
    place_.lock.reset();
}

bool RegionFile::created_here() const { return getpid() == pid_; }

void RegionFile::sign(RegionHeader& header) const {
    header.layout = region_layout();
    header.generation = random_number();
    header.writer_pid = static_cast<u64>(pid_);
    header.writer_start = start_ticks();
    std::strncpy(header.release, place_.release.c_str(), sizeof header.release - 1);
    std::strncpy(header.boot_id, boot_id().c_str(), sizeof header.boot_id - 1);
}

// Renamed first and retired after: whoever sees the mark finds the new one. A writer that dies in between leaves readers on a
// file without a name, which they notice, too (RegionView::stale).
void RegionFile::publish() {
    if (published_) return;
    if (!is_ours(fresh_path())) throw RegionError("region " + place_.path + " has a newer successor than this one: publish that");
    int predecessor = open_predecessor(place_.path);
    int error = rename(fresh_path().c_str(), place_.path.c_str()) == 0 ? 0 : errno;
    published_ = error == 0;  // from here on the name to take away is another
    if (predecessor >= 0) {
        const u32 retired = 1;
        struct stat status{};
        bool whole = fstat(predecessor, &status) == 0 && status.st_size >= static_cast<off_t>(sizeof(RegionHeader));
        if (!error && whole && pwrite(predecessor, &retired, sizeof retired, offsetof(RegionHeader, retired)) < 0) error = errno;
        ::close(predecessor);
    }
    if (error) throw RegionError("cannot publish " + place_.path + ": " + why(error));
}

// A successor may be at PATH by now, or have begun at PATH.new.
bool RegionFile::is_ours(const std::string& name) const { return is_same_file(fd_, name); }

void RegionFile::withdraw() noexcept {
    const std::string name = published_ ? place_.path : fresh_path();
    if (is_ours(name)) unlink(name.c_str());
}

std::string RegionFile::no_room() const {
    struct statvfs system{};
    std::string free = fstatvfs(fd_, &system) == 0 ? std::to_string(system.f_bavail * system.f_frsize >> 20) + " MiB free" : "full";
    return "no room for region " + place_.path + " (" + free +
           "): enlarge the shared memory (docker run --shm-size, or a memory-backed emptyDir at /dev/shm), or give another path";
}

u64 region_layout() {
    constexpr u64 sizes[] = {sizeof(RegionHeader), sizeof(IndexHeader), sizeof(Slot),  sizeof(SetRecord), kSegments,
                             kHolderLimit,         Table::kGuard,       kPoolOrders,   sizeof(NodeEntry), sizeof(Sheet)};
    u64 hash = Region::kVersion;
    for (u64 size : sizes) hash = scramble(hash + kGolden) ^ size;
    return hash;
}

std::string boot_id() {
    std::string id = read_text("/proc/sys/kernel/random/boot_id");
    return id.substr(0, id.find('\n'));
}

}  // namespace kvdir
