// A CUDA driver without a GPU: the functions that peer_agent/memory/cuda_driver.py declares, over host memory. Built by
// tests/contract/test_gpu_driver.py, to exercise gpu.py's calls, structs and lifetimes on any machine.
//
//   stream = a thread with a queue; a copy runs some time after it was queued, in order within the stream
//   device memory = a file in /dev/shm, mapped; its IPC handle is the file's name
//
// Knobs (exported): fake_refuse_copies(n) lets n more copies be queued and refuses those after; fake_refuse_records(1/0) refuses to
// record events; fake_hold(1/0) stops and starts every stream; fake_live() counts streams + events + allocations + open handles + page-locked ranges.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace {

constexpr int kInvalid = 1, kNoMemory = 2, kNotReady = 600, kAlready = 712, kNotRegistered = 713, kNoContext = 201;

std::mutex mutex;
std::condition_variable changed;
bool held = false;
std::atomic<bool> refuses_records = false;
long copies_left = -1;
long live = 0;
thread_local int depth = 0;

struct Event {
    std::shared_ptr<std::atomic<bool>> done = std::make_shared<std::atomic<bool>>(true);
};

struct Stream {
    std::deque<std::function<void()>> queue;
    bool ending = false;
    std::thread thread{[this] { run(); }};

    void run() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            changed.wait(lock, [this] { return ending || (!held && !queue.empty()); });
            if (ending) return;
            auto work = std::move(queue.front());
            queue.pop_front();
            lock.unlock();
            std::this_thread::yield();
            work();
            lock.lock();
            changed.notify_all();
        }
    }
    void push(std::function<void()> work) {
        const std::lock_guard<std::mutex> lock(mutex);
        queue.push_back(std::move(work));
        changed.notify_all();
    }
};

struct Mapping {
    size_t bytes;
    std::string name;
    bool own;
};
std::map<uint64_t, Mapping> mappings;      // by address
std::map<uint64_t, size_t> locked;         // page-locked host memory

const std::map<uint64_t, Mapping>::const_iterator mapping_of(uint64_t address) {
    auto next = mappings.upper_bound(address);
    if (next == mappings.begin()) return mappings.end();
    --next;
    return address < next->first + next->second.bytes ? next : mappings.end();
}

int map_file(const char* name, size_t bytes, bool create, uint64_t* address) {
    const int fd = shm_open(name, O_RDWR | (create ? O_CREAT | O_EXCL : 0), 0600);
    if (fd < 0) return kInvalid;
    if (create && ftruncate(fd, static_cast<off_t>(bytes)) != 0) return close(fd), kNoMemory;
    struct stat status {};
    fstat(fd, &status);
    bytes = static_cast<size_t>(status.st_size);
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) return kNoMemory;
    *address = reinterpret_cast<uint64_t>(at);
    mappings[*address] = {bytes, name, create};
    ++live;
    return 0;
}

int copy(Stream* stream, uint64_t to, uint64_t from, size_t bytes) {
    if (depth == 0) return kNoContext;
    {
        const std::lock_guard<std::mutex> lock(mutex);
        if (copies_left == 0) return kInvalid;
        if (copies_left > 0) --copies_left;
    }
    stream->push([=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); });
    return 0;
}

}  // namespace

extern "C" {

void fake_hold(int on) {
    const std::lock_guard<std::mutex> lock(mutex);
    held = on != 0;
    changed.notify_all();
}
void fake_refuse_copies(long after) {
    const std::lock_guard<std::mutex> lock(mutex);
    copies_left = after;
}
void fake_refuse_records(int on) { refuses_records = on != 0; }
long fake_live() {
    const std::lock_guard<std::mutex> lock(mutex);
    return live;
}

int cuInit(unsigned) { return 0; }
int cuGetErrorString(int code, const char** text) {
    *text = code == kInvalid ? "invalid argument" : code == kNoMemory ? "out of memory" : "some error";
    return 0;
}
int cuDeviceGetCount(int* count) { return *count = 2, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetUuid(void* uuid, int device) {
    std::memset(uuid, 0x10 + device, 16);
    return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1);
    return 0;
}
int cuCtxPushCurrent_v2(void* context) { return context == nullptr ? kNoContext : (++depth, 0); }
int cuCtxPopCurrent_v2(void** context) { return depth == 0 ? kNoContext : (--depth, *context = nullptr, 0); }

int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    if (depth == 0) return kNoContext;
    if (bytes > (size_t{1} << 40)) return kNoMemory;
    const std::lock_guard<std::mutex> lock(mutex);
    static std::atomic<int> next{0};
    char name[64];
    std::snprintf(name, sizeof name, "/kvdir-fake-cuda-%d-%d", getpid(), next++);
    return map_file(name, bytes, true, address);
}
int cuMemFree_v2(uint64_t address) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = mappings.find(address);
    if (found == mappings.end() || !found->second.own) return kInvalid;
    munmap(reinterpret_cast<void*>(address), found->second.bytes);
    shm_unlink(found->second.name.c_str());
    mappings.erase(found);
    --live;
    return 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
    return copy(static_cast<Stream*>(stream), to, reinterpret_cast<uint64_t>(from), bytes);
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
    return copy(static_cast<Stream*>(stream), reinterpret_cast<uint64_t>(to), from, bytes);
}

int cuStreamCreate(void** stream, unsigned flags) {
    if (depth == 0 || flags != 1) return kInvalid;
    *stream = new Stream;
    const std::lock_guard<std::mutex> lock(mutex);
    ++live;
    return 0;
}
int cuStreamDestroy_v2(void* handle) {
    auto* stream = static_cast<Stream*>(handle);
    {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return stream->queue.empty(); });
        stream->ending = true;
        --live;
        changed.notify_all();
    }
    stream->thread.join();
    delete stream;
    return 0;
}
int cuEventCreate(void** event, unsigned flags) {
    if (depth == 0 || flags != 2) return kInvalid;
    *event = new Event;
    const std::lock_guard<std::mutex> lock(mutex);
    ++live;
    return 0;
}
int cuEventRecord(void* event, void* stream) {
    if (depth == 0) return kNoContext;
    if (refuses_records) return kNoMemory;
    auto done = static_cast<Event*>(event)->done = std::make_shared<std::atomic<bool>>(false);
    static_cast<Stream*>(stream)->push([done] { done->store(true); });
    return 0;
}
int cuEventQuery(void* event) {
    if (depth == 0) return kNoContext;
    return static_cast<Event*>(event)->done->load() ? 0 : kNotReady;
}
int cuEventDestroy_v2(void* event) {
    delete static_cast<Event*>(event);
    const std::lock_guard<std::mutex> lock(mutex);
    --live;
    return 0;
}

int cuMemHostRegister_v2(void* address, size_t bytes, unsigned) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!locked.emplace(reinterpret_cast<uint64_t>(address), bytes).second) return kAlready;
    ++live;
    return 0;
}
int cuMemHostUnregister(void* address) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (locked.erase(reinterpret_cast<uint64_t>(address)) == 0) return kNotRegistered;
    --live;
    return 0;
}

struct IpcHandle {
    char reserved[64];
};
int cuIpcGetMemHandle(IpcHandle* handle, uint64_t address) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = mappings.find(address);
    if (found == mappings.end()) return kInvalid;
    std::memset(handle, 0, sizeof *handle);
    std::strncpy(handle->reserved, found->second.name.c_str(), sizeof handle->reserved - 1);
    return 0;
}
int cuIpcOpenMemHandle_v2(uint64_t* address, IpcHandle handle, unsigned flags) {
    if (depth == 0 || flags != 1) return kInvalid;
    const std::lock_guard<std::mutex> lock(mutex);
    return map_file(handle.reserved, 0, false, address);
}
int cuIpcCloseMemHandle(uint64_t address) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = mappings.find(address);
    if (found == mappings.end() || found->second.own) return kInvalid;
    munmap(reinterpret_cast<void*>(address), found->second.bytes);
    mappings.erase(found);
    --live;
    return 0;
}
int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = mapping_of(address);
    if (found == mappings.end()) return kInvalid;
    switch (attribute) {
        case 10: *static_cast<bool*>(value) = true; return 0;
        case 11: *static_cast<uint64_t*>(value) = found->first; return 0;
        case 12: *static_cast<uint64_t*>(value) = found->second.bytes; return 0;
        default: return kInvalid;
    }
}

}  // extern "C"
