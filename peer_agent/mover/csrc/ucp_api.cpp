#include "ucp_api.hpp"

#include <dlfcn.h>

#include <stdexcept>

namespace kvdir::ucx {
namespace {

template <typename Function>
void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) throw std::runtime_error(std::string("it has no function ") + name);
}

void require_version(const Api& api) {
    if (api.major == kMajor && api.minor >= kMinor) return;
    throw std::runtime_error("it is UCX " + std::to_string(api.major) + "." + std::to_string(api.minor) + "; " + std::to_string(kMajor) +
                             "." + std::to_string(kMinor) + " or a later 1.x is needed");
}

Api open(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == nullptr) throw std::runtime_error(dlerror());
    Api api;
    find(library, "ucp_get_version", api.get_version);
    api.get_version(&api.major, &api.minor, &api.release);
    require_version(api);
    find(library, "ucs_status_string", api.status_string);  // of libucs, which libucp brings along
    find(library, "ucp_config_read", api.config_read);
    find(library, "ucp_config_modify", api.config_modify);
    find(library, "ucp_config_release", api.config_release);
    find(library, "ucp_init_version", api.init_version);
    find(library, "ucp_cleanup", api.cleanup);
    find(library, "ucp_worker_create", api.worker_create);
    find(library, "ucp_worker_destroy", api.worker_destroy);
    find(library, "ucp_worker_query", api.worker_query);
    find(library, "ucp_worker_release_address", api.worker_release_address);
    find(library, "ucp_worker_progress", api.worker_progress);
    find(library, "ucp_worker_get_efd", api.worker_get_efd);
    find(library, "ucp_worker_arm", api.worker_arm);
    find(library, "ucp_worker_set_am_recv_handler", api.worker_set_am_recv_handler);
    find(library, "ucp_ep_create", api.ep_create);
    find(library, "ucp_ep_query", api.ep_query);
    find(library, "ucp_ep_close_nbx", api.ep_close_nbx);
    find(library, "ucp_am_send_nbx", api.am_send_nbx);
    find(library, "ucp_get_nbx", api.get_nbx);
    find(library, "ucp_request_free", api.request_free);
    find(library, "ucp_mem_map", api.mem_map);
    find(library, "ucp_mem_unmap", api.mem_unmap);
    find(library, "ucp_rkey_pack", api.rkey_pack);
    find(library, "ucp_rkey_buffer_release", api.rkey_buffer_release);
    find(library, "ucp_ep_rkey_unpack", api.ep_rkey_unpack);
    find(library, "ucp_rkey_destroy", api.rkey_destroy);
    return api;
}

}  // namespace

const Api& Api::load(const std::string& path) {
    static const Api api = open(path);  // one UCX per process: two copies of it do not get along
    return api;
}

}  // namespace kvdir::ucx
