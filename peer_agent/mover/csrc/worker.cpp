#include "worker.hpp"

#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <stdexcept>

namespace kvdir::ucx {
namespace {

constexpr unsigned kHelloId = 1, kWelcomeId = 2;
constexpr uint32_t kHelloMagic = 0x4D564B48;  // "HKVM"

struct Hello {
    uint32_t magic, zero;
    uint64_t link;  // the reader's number of it
    Incarnation incarnation;
};
struct Welcome {
    uint32_t magic, accepted;
    uint64_t link;
    uint64_t base, bytes;  // of the memory served
};
static_assert(sizeof(Hello) == 32 && sizeof(Welcome) == 32);

uint64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000ULL + static_cast<uint64_t>(t.tv_nsec);
}

// Of a link: no other peer can guess it, and so welcome us in its place.
uint64_t random_number() {
    uint64_t number = 0;
    if (getrandom(&number, sizeof number, 0) != static_cast<ssize_t>(sizeof number)) throw std::runtime_error("no random numbers");
    return number;
}

template <typename Message>
bool parse(const void* header, size_t bytes, Message& message) {
    if (bytes != sizeof message) return false;
    std::memcpy(&message, header, sizeof message);
    return message.magic == kHelloMagic;
}

}  // namespace

struct Worker::Batch {
    Worker* worker;
    Link* link;
    uint64_t ticket;
    size_t under_way;
    Status status = kOk;
};

struct Worker::Link {
    Worker* worker = nullptr;
    uint64_t number = 0;
    Endpoint endpoint = nullptr;  // null once closed
    RemoteKey key = nullptr;
    Status status = kOk;           // why the endpoint has failed
    uint64_t connect_ticket = 0;   // 0 once reported
    uint64_t close_ticket = 0;     // 0 until asked for
    bool closing = false;
    uint64_t base = 0, bytes = 0;  // of the peer's memory; bytes are 0 before Welcome
    size_t batches = 0;
};

Worker::Worker(const Api& api, const std::vector<std::pair<std::string, std::string>>& settings, const Incarnation& incarnation)
    : api_(api), incarnation_(incarnation) {
    try {
        start(settings);
    } catch (...) {
        stop();
        throw;
    }
}

Worker::~Worker() { stop(); }

void Worker::start(const std::vector<std::pair<std::string, std::string>>& settings) {
    Config* config = nullptr;
    require(api_.config_read(nullptr, nullptr, &config), "read its configuration");
    const std::unique_ptr<Config, void (*)(Config*)> held(config, api_.config_release);
    for (const auto& [name, value] : settings)
        require(api_.config_modify(config, name.c_str(), value.c_str()), ("set UCX_" + name + "=" + value).c_str());
    Params params;
    params.field_mask = kParamFeatures;
    params.features = kFeatureRma | kFeatureAm | kFeatureWakeup;
    require(api_.init_version(kMajor, kMinor, &params, config, &context_), "find a lane that it may use");
    WorkerParams worker;
    worker.field_mask = kWorkerThreadMode;
    require(api_.worker_create(context_, &worker, &worker_), "create a worker");
    require(api_.worker_get_efd(worker_, &event_fd_), "give an event descriptor");
    handle_messages(kHelloId, on_hello);
    handle_messages(kWelcomeId, on_welcome);
}

// In reverse order. Endpoints that are open go with their worker; batches must have ended. A mover leaves by _exit and comes here
// only when it could not start.
void Worker::stop() {
    for (const auto& item : links_)
        if (item.second->key != nullptr) api_.rkey_destroy(item.second->key);
    links_.clear();
    if (worker_ != nullptr) api_.worker_destroy(worker_);
    for (const Mapped& item : mapped_) api_.mem_unmap(context_, item.handle);
    if (context_ != nullptr) api_.cleanup(context_);
    worker_ = nullptr;
    context_ = nullptr;
}

void Worker::require(Status status, const char* what) const {
    if (status != kOk) throw std::runtime_error("UCX cannot " + std::string(what) + ": " + api_.status_string(status));
}

std::string Worker::reason(int64_t status) const { return api_.status_string(static_cast<Status>(status)); }

std::string Worker::address() const {
    WorkerAttributes attributes;
    attributes.field_mask = kWorkerAddress;
    require(api_.worker_query(worker_, &attributes), "tell its address");
    const std::string address(static_cast<const char*>(attributes.address), attributes.address_length);
    api_.worker_release_address(worker_, attributes.address);
    return address;
}

std::string Worker::map(void* base, size_t bytes, bool serve) {
    MapParams params;
    params.field_mask = kMapAddress | kMapLength | kMapProtection;
    params.address = base;
    params.length = bytes;
    params.prot = kLocalRead | kLocalWrite | (serve ? kRemoteRead : 0);
    Mapped mapped{reinterpret_cast<uint64_t>(base), reinterpret_cast<uint64_t>(base) + bytes, nullptr};
    require(api_.mem_map(context_, &params, &mapped.handle), "register memory");
    mapped_.push_back(mapped);
    if (!serve) return {};
    served_base_ = mapped.begin;
    served_bytes_ = bytes;
    return key_of(mapped.handle);
}

std::string Worker::key_of(MemoryHandle memory) const {
    void* packed = nullptr;
    size_t packed_bytes = 0;
    require(api_.rkey_pack(context_, memory, &packed, &packed_bytes), "pack a remote key");
    const std::string key(static_cast<const char*>(packed), packed_bytes);
    api_.rkey_buffer_release(packed);
    return key;
}

// UCX's own rule for event descriptors: only when arming succeeds after progress found nothing, the descriptor will tell.
bool Worker::progress(uint64_t budget_ns) {
    const uint64_t until_ns = now_ns() + budget_ns;
    do {
        while (api_.worker_progress(worker_) != 0)
            if (now_ns() >= until_ns) return false;
        const Status status = api_.worker_arm(worker_);
        if (status == kOk) return true;
        if (status != kBusy) require(status, "arm its event descriptor");
    } while (now_ns() < until_ns);
    return false;
}

uint64_t Worker::connect(const std::string& address, const std::string& key, const Incarnation& incarnation, uint64_t ticket) {
    auto link = std::make_unique<Link>();
    link->worker = this;
    do link->number = random_number();
    while (link->number == 0 || links_.count(link->number) != 0);
    link->connect_ticket = ticket;
    EndpointParams params;
    params.field_mask = kEndpointAddress | kEndpointErrorMode | kEndpointErrorHandler;
    params.address = address.data();
    params.err_mode = kErrorModePeer;
    params.err_handler = on_failed;
    params.err_arg = link.get();
    require(api_.ep_create(worker_, &params, &link->endpoint), "reach the peer");
    Link* made = (links_[link->number] = std::move(link)).get();
    const Status unpacked = api_.ep_rkey_unpack(made->endpoint, key.data(), &made->key);
    if (unpacked != kOk) {
        close(made->number, 0);
        throw std::invalid_argument("UCX cannot read the peer's key: " + reason(unpacked));
    }
    const Hello hello{kHelloMagic, 0, made->number, incarnation};
    send(made->endpoint, kHelloId, &hello, sizeof hello, kSendReply);
    return made->number;
}

void Worker::get(uint64_t number, const std::vector<Get>& gets, uint64_t ticket) {
    const auto found = links_.find(number);
    Link* link = found == links_.end() ? nullptr : found->second.get();
    if (link == nullptr || link->closing || link->bytes == 0 || link->status != kOk) {
        report(ticket, link != nullptr && link->status != kOk ? link->status : kNotConnected);
        return;
    }
    for (const Get& get : gets)
        if (get.from > link->bytes || get.bytes > link->bytes - get.from)
            throw std::invalid_argument("a get beyond the memory that the peer serves");
    RequestParams params;
    params.memory = memory_of(gets);
    auto* batch = new Batch{this, link, ticket, 1};  // one for the loop below: it ends nowhere else
    params.mask = kRequestCallback | kRequestUserData | kRequestMemory;
    params.callback = on_get;
    params.user_data = batch;
    ++link->batches;
    for (const Get& get : gets) {
        if (link->status != kOk) {
            batch->status = link->status;
            break;
        }
        ++batch->under_way;
        void* request = api_.get_nbx(link->endpoint, reinterpret_cast<void*>(get.to), get.bytes, link->base + get.from, link->key, &params);
        if (request != nullptr && !is_error(request)) continue;
        --batch->under_way;
        if (request == nullptr) continue;
        batch->status = error_of(request);
        break;
    }
    finish(batch);
}

MemoryHandle Worker::memory_of(const std::vector<Get>& gets) const {
    for (const Mapped& item : mapped_) {
        const auto inside = [&](const Get& get) { return get.to >= item.begin && get.to <= item.end && get.bytes <= item.end - get.to; };
        if (std::all_of(gets.begin(), gets.end(), inside)) return item.handle;
    }
    throw std::invalid_argument("gets into memory that is not mapped, or in more than one piece of it");
}

void Worker::close(uint64_t number, uint64_t ticket) {
    const auto found = links_.find(number);
    if (found == links_.end() || found->second->closing) {
        report(ticket, kOk);
        return;
    }
    Link* link = found->second.get();
    link->closing = true;
    link->close_ticket = ticket;
    if (link->connect_ticket != 0) report(std::exchange(link->connect_ticket, 0), kCanceled);
    RequestParams params;
    params.mask = kRequestCallback | kRequestUserData | kRequestFlags;
    params.callback = on_closed;
    params.user_data = link;
    params.flags = kCloseForce;
    void* request = api_.ep_close_nbx(link->endpoint, &params);
    if (request == nullptr || is_error(request)) {
        link->endpoint = nullptr;
        settle(link);
    }
}

bool Worker::failed(uint64_t number) const {
    const auto found = links_.find(number);
    return found == links_.end() || found->second->closing || found->second->status != kOk;
}

std::vector<Lane> Worker::lanes(uint64_t number) const {
    std::vector<Lane> lanes;
    const auto found = links_.find(number);
    if (found == links_.end() || found->second->endpoint == nullptr) return lanes;
    TransportEntry entries[64] = {};
    EndpointAttributes attributes;
    attributes.field_mask = kEndpointTransports;
    attributes.entries = entries;
    attributes.num_entries = 64;
    attributes.entry_size = sizeof(TransportEntry);
    require(api_.ep_query(found->second->endpoint, &attributes), "tell its lanes");
    for (unsigned i = 0; i < attributes.num_entries; ++i) lanes.push_back({entries[i].transport, entries[i].device});
    return lanes;
}

void Worker::handle_messages(unsigned id, Status (*callback)(void*, const void*, size_t, void*, size_t, const MessageParams*)) {
    HandlerParams params;
    params.field_mask = kHandlerAll;
    params.id = id;
    params.callback = callback;
    params.arg = this;
    require(api_.worker_set_am_recv_handler(worker_, &params), "take messages");
}

void Worker::send(Endpoint to, unsigned id, const void* header, size_t bytes, uint32_t flags) {
    RequestParams params;
    params.mask = kRequestCallback | kRequestUserData | kRequestFlags;
    params.callback = on_sent;
    params.user_data = this;
    params.flags = flags | kSendCopyHeader;
    api_.am_send_nbx(to, id, header, bytes, nullptr, 0, &params);  // a failure shows at the endpoint, or as silence
}

void Worker::finish(Batch* batch) {
    if (--batch->under_way != 0) return;
    const std::unique_ptr<Batch> ended(batch);
    Link* link = batch->link;
    report(batch->ticket, batch->status);
    --link->batches;
    settle(link);
}

// Forgets a link of which nothing is left.
void Worker::settle(Link* link) {
    if (!link->closing || link->endpoint != nullptr || link->batches != 0) return;
    if (link->key != nullptr) api_.rkey_destroy(link->key);
    if (link->close_ticket != 0) report(link->close_ticket, kOk);
    links_.erase(link->number);
}

void Worker::on_get(void* request, Status status, void* user_data) {
    auto* batch = static_cast<Batch*>(user_data);
    if (status != kOk) batch->status = status;
    Worker* worker = batch->worker;
    worker->api_.request_free(request);
    worker->finish(batch);
}

void Worker::on_closed(void* request, Status, void* user_data) {
    auto* link = static_cast<Link*>(user_data);
    Worker* worker = link->worker;
    worker->api_.request_free(request);
    link->endpoint = nullptr;
    worker->settle(link);
}

void Worker::on_sent(void* request, Status, void* self) { static_cast<Worker*>(self)->api_.request_free(request); }

void Worker::on_failed(void* user_data, Endpoint, Status status) {
    auto* link = static_cast<Link*>(user_data);
    link->status = status;
    if (link->connect_ticket != 0) link->worker->report(std::exchange(link->connect_ticket, 0), status);
}

Status Worker::on_hello(void* self, const void* header, size_t bytes, void*, size_t, const MessageParams* params) {
    auto* worker = static_cast<Worker*>(self);
    Hello hello;
    if (!parse(header, bytes, hello) || (params->attributes & kMessageReplyTo) == 0) return kOk;
    const bool mine = hello.incarnation == worker->incarnation_;
    const Welcome welcome{kHelloMagic, mine ? 1U : 0U, hello.link, mine ? worker->served_base_ : 0, mine ? worker->served_bytes_ : 0};
    worker->send(params->reply_to, kWelcomeId, &welcome, sizeof welcome, 0);
    return kOk;
}

Status Worker::on_welcome(void* self, const void* header, size_t bytes, void*, size_t, const MessageParams*) {
    auto* worker = static_cast<Worker*>(self);
    Welcome welcome;
    if (!parse(header, bytes, welcome)) return kOk;
    const auto found = worker->links_.find(welcome.link);
    if (found == worker->links_.end() || found->second->connect_ticket == 0) return kOk;
    Link* link = found->second.get();
    if (welcome.accepted == 1) {
        link->base = welcome.base;
        link->bytes = welcome.bytes;
    }
    worker->report(std::exchange(link->connect_ticket, 0), link->bytes != 0 ? kOk : kNotConnected);
    return kOk;
}

}  // namespace kvdir::ucx
