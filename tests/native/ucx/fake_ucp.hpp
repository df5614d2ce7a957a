// A libucp in one process: workers that reach each other by pointer, and do nothing until they are progressed.
//
// What it is faithful about, because worker.cpp relies on it: callbacks come from progress only, never from the call that posted;
// a call may finish at once (null), fail at once, or give a request; a forced close fails what is under way before it completes
// itself; a failed endpoint fails its requests and tells its handler once; requests are freed by the user.
// What goes wrong is said by the test, in `Fake::rules`.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "check.hpp"
#include "ucp_api.hpp"

namespace kvdir::ucx {

struct ucp_ep;

struct ucp_worker {
    HandlerParams handlers[4];
    std::deque<std::function<void()>> due;
    std::vector<ucp_ep*> endpoints;
    bool deaf = false;  // a stopped process: takes no messages
};

struct Posted {
    void *request, *to;
    size_t bytes;
    uint64_t from;
    RequestParams params;
};

struct ucp_ep {
    ucp_worker *owner, *peer;
    EndpointParams params;
    std::vector<Posted> posted;
    bool open = true;
};

struct ucp_mem {
    void* base;
    size_t bytes;
};

struct Rules {
    size_t finish_at_once = 0;       // every n-th get; 0: none
    size_t fail_after = ~size_t{0};  // posts until get_nbx returns an error
    Status connect = kOk;
    std::vector<TransportEntry> lanes{{"rc_mlx5", "mlx5_0:1"}};
};

struct Fake {
    static inline Rules rules;
    static inline size_t requests = 0, posts = 0, keys = 0;  // requests and keys: alive now

    static void* new_request() {
        ++requests;
        return new char;
    }
    static void free_request(void* request) {
        --requests;
        delete static_cast<char*>(request);
    }
    static void* failure(Status status) { return reinterpret_cast<void*>(static_cast<intptr_t>(status)); }

    // The owner answers: bytes move, in the reverse order of posting, for nobody promised another.
    static void answer(ucp_ep* endpoint) {
        auto posted = std::exchange(endpoint->posted, {});
        std::reverse(posted.begin(), posted.end());
        for (const Posted& item : posted) endpoint->owner->due.push_back([item] {
            std::memcpy(item.to, reinterpret_cast<void*>(item.from), item.bytes);
            item.params.callback(item.request, kOk, item.params.user_data);
        });
    }
    static void fail_posted(ucp_ep* endpoint, Status status) {
        for (const Posted& item : std::exchange(endpoint->posted, {}))
            endpoint->owner->due.push_back([item, status] { item.params.callback(item.request, status, item.params.user_data); });
    }
    // The peer is gone.
    static void lose(ucp_ep* endpoint) {
        endpoint->owner->due.push_back([endpoint] {
            if (endpoint->open) endpoint->params.err_handler(endpoint->params.err_arg, endpoint, -25);
        });
        fail_posted(endpoint, -25);
    }

    static Api api() {
        Api api;
        api.status_string = [](Status status) -> const char* { return status == kOk ? "fine" : "not fine"; };
        api.config_read = [](const char*, const char*, Config** config) -> Status { *config = reinterpret_cast<Config*>(new char); return kOk; };
        api.config_release = [](Config* config) { delete reinterpret_cast<char*>(config); };
        api.config_modify = [](Config*, const char* name, const char*) -> Status { return std::string(name) == "NONSENSE" ? -12 : kOk; };
        api.init_version = [](unsigned, unsigned, const Params*, const Config*, Context* context) -> Status {
            *context = reinterpret_cast<Context>(new char);
            return kOk;
        };
        api.cleanup = [](Context context) { delete reinterpret_cast<char*>(context); };
        api.worker_create = [](Context, const WorkerParams*, WorkerHandle* worker) -> Status { *worker = new ucp_worker; return kOk; };
        api.worker_destroy = [](WorkerHandle worker) {
            for (ucp_ep* endpoint : worker->endpoints) delete endpoint;
            delete worker;
        };
        api.worker_query = [](WorkerHandle worker, WorkerAttributes* attributes) -> Status {
            attributes->address = new WorkerHandle(worker);
            attributes->address_length = sizeof worker;
            return kOk;
        };
        api.worker_release_address = [](WorkerHandle, void* address) { delete static_cast<WorkerHandle*>(address); };
        api.worker_progress = [](WorkerHandle worker) -> unsigned {
            if (worker->due.empty()) return 0;
            const auto next = worker->due.front();
            worker->due.pop_front();
            next();
            return 1;
        };
        api.worker_get_efd = [](WorkerHandle, int* fd) -> Status { *fd = 7; return kOk; };
        api.worker_arm = [](WorkerHandle worker) -> Status { return worker->due.empty() ? kOk : kBusy; };
        api.worker_set_am_recv_handler = [](WorkerHandle worker, const HandlerParams* params) -> Status {
            worker->handlers[params->id] = *params;
            return kOk;
        };
        api.ep_create = [](WorkerHandle worker, const EndpointParams* params, Endpoint* endpoint) -> Status {
            if (rules.connect != kOk) return rules.connect;
            ucp_worker* peer = nullptr;
            std::memcpy(&peer, params->address, sizeof peer);
            worker->endpoints.push_back(*endpoint = new ucp_ep{worker, peer, *params, {}, true});
            return kOk;
        };
        api.ep_query = [](Endpoint, EndpointAttributes* attributes) -> Status {
            attributes->num_entries = static_cast<unsigned>(std::min<size_t>(attributes->num_entries, rules.lanes.size()));
            std::copy_n(rules.lanes.begin(), attributes->num_entries, attributes->entries);
            return kOk;
        };
        api.ep_close_nbx = [](Endpoint endpoint, const RequestParams* params) -> void* {
            CHECK(endpoint->open);
            endpoint->open = false;
            fail_posted(endpoint, kCanceled);
            void* request = new_request();
            endpoint->owner->due.push_back([request, copy = *params] { copy.callback(request, kOk, copy.user_data); });
            return request;
        };
        api.am_send_nbx = [](Endpoint from, unsigned id, const void* header, size_t bytes, const void*, size_t, const RequestParams*) -> void* {
            const std::string copy(static_cast<const char*>(header), bytes);
            ucp_worker *here = from->owner, *there = from->peer;
            if (there->deaf) return nullptr;
            there->due.push_back([here, there, id, copy] {
                there->endpoints.push_back(new ucp_ep{there, here, {}, {}, true});
                const MessageParams params{kMessageReplyTo, there->endpoints.back()};
                there->handlers[id].callback(there->handlers[id].arg, copy.data(), copy.size(), nullptr, 0, &params);
            });
            return nullptr;
        };
        api.get_nbx = [](Endpoint endpoint, void* to, size_t bytes, uint64_t from, RemoteKey, const RequestParams* params) -> void* {
            CHECK(endpoint->open);
            if (posts++ >= rules.fail_after) return failure(-3);
            if (rules.finish_at_once != 0 && posts % rules.finish_at_once == 0) {
                std::memcpy(to, reinterpret_cast<void*>(from), bytes);
                return nullptr;
            }
            endpoint->posted.push_back({new_request(), to, bytes, from, *params});
            return endpoint->posted.back().request;
        };
        api.request_free = free_request;
        api.mem_map = [](Context, const MapParams* params, MemoryHandle* memory) -> Status {
            *memory = new ucp_mem{params->address, params->length};
            return kOk;
        };
        api.mem_unmap = [](Context, MemoryHandle memory) -> Status { delete memory; return kOk; };
        api.rkey_pack = [](Context, MemoryHandle, void** key, size_t* bytes) -> Status { *key = new char('k'); *bytes = 1; return kOk; };
        api.rkey_buffer_release = [](void* key) { delete static_cast<char*>(key); };
        api.ep_rkey_unpack = [](Endpoint, const void* key, RemoteKey* made) -> Status {
            if (*static_cast<const char*>(key) != 'k') return -5;
            ++keys;
            *made = reinterpret_cast<RemoteKey>(new char);
            return kOk;
        };
        api.rkey_destroy = [](RemoteKey key) {
            --keys;
            delete reinterpret_cast<char*>(key);
        };
        return api;
    }
};

}  // namespace kvdir::ucx
