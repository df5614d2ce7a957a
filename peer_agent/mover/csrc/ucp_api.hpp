// The few functions and structures of libucp that we use, declared by ourselves so that building needs no UCX.
//
// From ucp/api/ucp.h and ucp_def.h of UCX 1.19 to 1.22 (BSD-3, openucx.org). Every structure begins with a mask that says which
// fields are given; new fields are only ever appended, so these prefixes stay valid for the whole of UCX 1. `Api::load` refuses
// other majors and anything before 1.19 (which cannot unpack keys of, or be read by, later versions).
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvdir::ucx {

constexpr unsigned kMajor = 1, kMinor = 19;

using Status = int8_t;  // ucs_status_t is a packed enum
constexpr Status kOk = 0, kInProgress = 1, kBusy = -15, kCanceled = -16, kNotConnected = -24, kLastError = -100;

using Context = struct ucp_context*;
using WorkerHandle = struct ucp_worker*;
using Endpoint = struct ucp_ep*;
using MemoryHandle = struct ucp_mem*;
using RemoteKey = struct ucp_rkey*;
using Config = struct ucp_config;

// What non-blocking calls return: null (done), a status, or a request.
inline bool is_error(const void* p) { return reinterpret_cast<uintptr_t>(p) >= static_cast<uintptr_t>(static_cast<intptr_t>(kLastError)); }
inline Status error_of(const void* p) { return static_cast<Status>(reinterpret_cast<intptr_t>(p)); }

constexpr uint64_t bit(int n) { return uint64_t{1} << n; }

struct Params {  // ucp_params_t
    uint64_t field_mask = 0, features = 0;
    size_t request_size = 0;
    void (*request_init)(void*) = nullptr;
    void (*request_cleanup)(void*) = nullptr;
    uint64_t tag_sender_mask = 0;
    int mt_workers_shared = 0;
    size_t estimated_num_eps = 0, estimated_num_ppn = 0;
    const char* name = nullptr;
    size_t node_local_id = 0;
};
constexpr uint64_t kParamFeatures = bit(0);
constexpr uint64_t kFeatureRma = bit(1), kFeatureWakeup = bit(4), kFeatureAm = bit(6);

struct WorkerParams {  // ucp_worker_params_t
    uint64_t field_mask = 0;
    int thread_mode = 0;  // 0: single
    unsigned long cpu_mask[16] = {};
    unsigned events = 0;
    void* user_data = nullptr;
    int event_fd = -1;
    uint64_t flags = 0;
    const char* name = nullptr;
    size_t am_alignment = 0;
    uint64_t client_id = 0;
};
constexpr uint64_t kWorkerThreadMode = bit(0);

struct WorkerAttributes {  // ucp_worker_attr_t
    uint64_t field_mask = 0;
    int thread_mode = 0;
    uint32_t address_flags = 0;
    void* address = nullptr;
    size_t address_length = 0, max_am_header = 0;
    char name[32] = {};
    size_t max_debug_string = 0;
};
constexpr uint64_t kWorkerAddress = bit(1);

struct SocketAddress {  // ucs_sock_addr_t
    const sockaddr* addr = nullptr;
    socklen_t addrlen = 0;
};

struct EndpointParams {  // ucp_ep_params_t
    uint64_t field_mask = 0;
    const void* address = nullptr;
    int err_mode = 0;
    void (*err_handler)(void* arg, Endpoint, Status) = nullptr;
    void* err_arg = nullptr;
    void* user_data = nullptr;
    unsigned flags = 0;
    SocketAddress sockaddr;
    void* conn_request = nullptr;
    const char* name = nullptr;
    SocketAddress local_sockaddr;
};
constexpr uint64_t kEndpointAddress = bit(0), kEndpointErrorMode = bit(1), kEndpointErrorHandler = bit(2);
constexpr int kErrorModePeer = 1;

struct MapParams {  // ucp_mem_map_params_t
    uint64_t field_mask = 0;
    void* address = nullptr;
    size_t length = 0;
    unsigned flags = 0, prot = 0;
    int memory_type = 0;
    const void* exported = nullptr;
};
constexpr uint64_t kMapAddress = bit(0), kMapLength = bit(1), kMapProtection = bit(3);
constexpr unsigned kLocalRead = 1, kLocalWrite = 2, kRemoteRead = 1 << 8;

struct RequestParams {  // ucp_request_param_t
    uint32_t mask = 0, flags = 0;
    void* request = nullptr;
    void (*callback)(void* request, Status, void* user_data) = nullptr;
    uint64_t datatype = 0;
    void* user_data = nullptr;
    void* reply_buffer = nullptr;
    int memory_type = 0;
    void* recv_info = nullptr;
    MemoryHandle memory = nullptr;
    uint64_t remote_datatype = 0;
    const void* remote = nullptr;
    size_t remote_count = 0;
};
constexpr uint32_t kRequestCallback = 1 << 1, kRequestUserData = 1 << 2, kRequestFlags = 1 << 4, kRequestMemory = 1 << 8;
constexpr uint32_t kCloseForce = 1, kSendReply = 1, kSendCopyHeader = 1 << 3;

struct MessageParams {  // ucp_am_recv_param_t
    uint64_t attributes;
    Endpoint reply_to;
};
constexpr uint64_t kMessageReplyTo = bit(0);

struct HandlerParams {  // ucp_am_handler_param_t
    uint64_t field_mask = 0;
    unsigned id = 0;
    uint32_t flags = 0;
    Status (*callback)(void* arg, const void* header, size_t header_bytes, void* data, size_t bytes, const MessageParams*) = nullptr;
    void* arg = nullptr;
};
constexpr uint64_t kHandlerAll = bit(0) | bit(1) | bit(2) | bit(3);

struct TransportEntry {  // ucp_transport_entry_t
    const char *transport, *device;
};

struct EndpointAttributes {  // ucp_ep_attr_t
    uint64_t field_mask = 0;
    char name[32] = {};
    sockaddr_storage local{}, remote{};
    TransportEntry* entries = nullptr;
    unsigned num_entries = 0;
    size_t entry_size = 0;
    void* user_data = nullptr;
};
constexpr uint64_t kEndpointTransports = bit(3);

static_assert(sizeof(Params) == 88 && offsetof(Params, features) == 8);
static_assert(sizeof(WorkerParams) == 200 && offsetof(WorkerParams, events) == 144);
static_assert(sizeof(WorkerAttributes) == 80 && offsetof(WorkerAttributes, address) == 16);
static_assert(sizeof(EndpointParams) == 104 && offsetof(EndpointParams, flags) == 48);
static_assert(sizeof(MapParams) == 48 && offsetof(MapParams, prot) == 28);
static_assert(sizeof(RequestParams) == 96 && offsetof(RequestParams, memory) == 64);
static_assert(sizeof(HandlerParams) == 32 && offsetof(HandlerParams, callback) == 16);
static_assert(sizeof(EndpointAttributes) == 328 && offsetof(EndpointAttributes, entries) == 296);

// The library's functions, under their names without "ucp_" and "ucs_".
struct Api {
    const char* (*status_string)(Status) = nullptr;
    void (*get_version)(unsigned* major, unsigned* minor, unsigned* release) = nullptr;
    Status (*config_read)(const char* prefix, const char* file, Config**) = nullptr;
    Status (*config_modify)(Config*, const char* name, const char* value) = nullptr;
    void (*config_release)(Config*) = nullptr;
    Status (*init_version)(unsigned major, unsigned minor, const Params*, const Config*, Context*) = nullptr;
    void (*cleanup)(Context) = nullptr;
    Status (*worker_create)(Context, const WorkerParams*, WorkerHandle*) = nullptr;
    void (*worker_destroy)(WorkerHandle) = nullptr;
    Status (*worker_query)(WorkerHandle, WorkerAttributes*) = nullptr;
    void (*worker_release_address)(WorkerHandle, void*) = nullptr;
    unsigned (*worker_progress)(WorkerHandle) = nullptr;
    Status (*worker_get_efd)(WorkerHandle, int*) = nullptr;
    Status (*worker_arm)(WorkerHandle) = nullptr;
    Status (*worker_set_am_recv_handler)(WorkerHandle, const HandlerParams*) = nullptr;
    Status (*ep_create)(WorkerHandle, const EndpointParams*, Endpoint*) = nullptr;
    Status (*ep_query)(Endpoint, EndpointAttributes*) = nullptr;
    void* (*ep_close_nbx)(Endpoint, const RequestParams*) = nullptr;
    void* (*am_send_nbx)(Endpoint, unsigned id, const void* header, size_t, const void* data, size_t, const RequestParams*) = nullptr;
    void* (*get_nbx)(Endpoint, void* to, size_t bytes, uint64_t from, RemoteKey, const RequestParams*) = nullptr;
    void (*request_free)(void*) = nullptr;
    Status (*mem_map)(Context, const MapParams*, MemoryHandle*) = nullptr;
    Status (*mem_unmap)(Context, MemoryHandle) = nullptr;
    Status (*rkey_pack)(Context, MemoryHandle, void** buffer, size_t* bytes) = nullptr;
    void (*rkey_buffer_release)(void*) = nullptr;
    Status (*ep_rkey_unpack)(Endpoint, const void*, RemoteKey*) = nullptr;
    void (*rkey_destroy)(RemoteKey) = nullptr;

    unsigned major = 0, minor = 0, release = 0;

    // The library at `path` stays loaded for good. Throws std::runtime_error: cannot be loaded, or no version of ours.
    static const Api& load(const std::string& path);
};

}  // namespace kvdir::ucx
