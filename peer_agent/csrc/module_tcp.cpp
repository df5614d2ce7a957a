// peer_agent._native.TcpServer and TcpConnection. Contracts: peer_agent/_native.pyi.
#include <memory>

#include "binding.hpp"
#include "tcp_client.hpp"
#include "tcp_server.hpp"

namespace kvdir::binding {
namespace {

// ---- TcpServer ----

struct ServerObject {
    PyObject_HEAD
    TcpServer* server;
    Buffer* region;  // exported until close, so that the mapping outlives the thread
};

void stop(ServerObject* self) {
    if (self->server == nullptr) return;
    {
        const Unlocked unlocked;  // the thread never takes the GIL, but a turn may take a moment
        self->server->close();
    }
    delete self->region;
    self->region = nullptr;
}

PyObject* server_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"region", "epoch", "host", "port", "max_connections", "tls", nullptr};
    auto region = std::make_unique<Buffer>();
    unsigned long long epoch = 0;
    const char* host = nullptr;
    int port = 0;
    Py_ssize_t max_connections = 256;
    PyObject* tls = nullptr;
    if (!parse(args, kwargs, "y*Ksi|$nO:TcpServer", names, &region->view, &epoch, &host, &port, &max_connections, &tls)) return nullptr;
    return guarded(PyExc_OSError, [&]() -> PyObject* {
        if (port < 0 || port > 65535) throw std::invalid_argument("port " + std::to_string(port) + " is not in 0..65535");
        if (max_connections < 1) throw std::invalid_argument("max_connections must be at least 1");
        auto server = std::make_unique<TcpServer>(region->region(), epoch, host, static_cast<uint16_t>(port),
                                                  static_cast<size_t>(max_connections), Patience{},
                                                  stream_maker(tls, tls::Side::SERVER));
        auto* self = reinterpret_cast<ServerObject*>(allocate(type));
        if (self == nullptr) return nullptr;
        self->server = server.release();
        self->region = region.release();
        return reinterpret_cast<PyObject*>(self);
    });
}

void server_dealloc(PyObject* object) {
    auto* self = reinterpret_cast<ServerObject*>(object);
    stop(self);
    delete self->server;
    free_object(object);
}

PyObject* server_port(PyObject* self, void*) { return PyLong_FromLong(reinterpret_cast<ServerObject*>(self)->server->port()); }

PyObject* server_grant(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"capability", "records", nullptr};
    Buffer capability, records;
    if (!parse(args, kwargs, "y*y*:grant", names, &capability.view, &records.view)) return nullptr;
    if (reinterpret_cast<ServerObject*>(self)->region == nullptr) Py_RETURN_NONE;  // closed, and the arena perhaps unmapped
    return guarded(PyExc_RuntimeError, [&] {
        const auto granted = unpack<Record>(records, "records");
        reinterpret_cast<ServerObject*>(self)->server->grant(capability_of(capability), granted.data(), granted.size());
        return Py_NewRef(Py_None);
    });
}

PyObject* server_revoke(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"lock", nullptr};
    unsigned long long lock = 0;
    if (!parse(args, kwargs, "K:revoke", names, &lock)) return nullptr;
    reinterpret_cast<ServerObject*>(self)->server->revoke(lock);
    Py_RETURN_NONE;
}

PyObject* server_stats(PyObject* self, PyObject*) {
    const ServerStats& stats = reinterpret_cast<ServerObject*>(self)->server->stats();
    const auto requests = [&](Refusal why) -> unsigned long long { return stats.requests[static_cast<size_t>(why)].load(); };
    return Py_BuildValue("{sKsKsKsKsKsKsKsKsKsKsKsKsKsK}", "connections", stats.connections.load(), "reads", stats.reads.load(), "blocks",
                         stats.blocks.load(), "bytes", stats.bytes.load(), "refused", stats.refused.load(), "torn",
                         stats.torn.load(), "protocol_errors", stats.protocol_errors.load(), "connections_refused",
                         stats.connections_refused.load(), "capability_uncovered", stats.uncovered.load(), "capability_malformed",
                         requests(Refusal::MALFORMED), "capability_epoch", requests(Refusal::EPOCH), "capability_expired",
                         requests(Refusal::EXPIRED), "capability_ended", requests(Refusal::ENDED), "capability_forged",
                         requests(Refusal::FORGED));
}

PyObject* server_close(PyObject* self, PyObject*) {
    stop(reinterpret_cast<ServerObject*>(self));
    Py_RETURN_NONE;
}

PyMethodDef server_methods[] = {
    {"grant", method(server_grant), METH_VARARGS | METH_KEYWORDS, "Lets the slots of these records be read with a capability."},
    {"revoke", method(server_revoke), METH_VARARGS | METH_KEYWORDS, "Ends a grant."},
    {"stats", server_stats, METH_NOARGS, "Counters since the start."},
    {"close", server_close, METH_NOARGS, "Stops and joins the thread; idempotent."},
    {nullptr, nullptr, 0, nullptr},
};
PyGetSetDef server_properties[] = {{"port", server_port, nullptr, "Bound port.", nullptr}, {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot server_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(server_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(server_dealloc)},
    {Py_tp_methods, server_methods},
    {Py_tp_getset, server_properties},
    {Py_tp_doc, const_cast<char*>("Owner's side of the tcp plane.")},
    {0, nullptr},
};
PyType_Spec server_spec = {"peer_agent._native.TcpServer", sizeof(ServerObject), 0, Py_TPFLAGS_DEFAULT, server_slots};

// ---- TcpConnection ----

struct ConnectionObject {
    PyObject_HEAD
    TcpClient* client;
};

PyObject* connection_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"host", "port", "deadline_ns", "tls", nullptr};
    const char* host = nullptr;
    int port = 0;
    unsigned long long deadline_ns = 0;
    PyObject* tls = nullptr;
    if (!parse(args, kwargs, "siK|$O:TcpConnection", names, &host, &port, &deadline_ns, &tls)) return nullptr;
    return guarded(PyExc_ConnectionError, [&]() -> PyObject* {
        require_target(port, deadline_ns);
        std::unique_ptr<TcpClient> client;
        const std::string where = host;
        MakeStream make = stream_maker(tls, tls::Side::CLIENT);
        {
            const Unlocked unlocked;
            client = std::make_unique<TcpClient>(where, static_cast<uint16_t>(port), deadline_ns, std::move(make));
        }
        return new_connection(reinterpret_cast<PyObject*>(type), std::move(client));
    });
}

void connection_dealloc(PyObject* object) {
    delete reinterpret_cast<ConnectionObject*>(object)->client;
    free_object(object);
}

PyObject* connection_read(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"capability", "epoch", "records", "namespace_digest", "fingerprints", "width",
                                        "region", "destinations", "check", "deadline_ns", nullptr};
    unsigned long long epoch = 0;
    Buffer shown;
    SlotRead read;
    if (!parse(args, kwargs, "y*Ky*y*y*Iw*y*pK:read", names, &shown.view, &epoch, &read.records.view, &read.digest.view,
               &read.fingerprints.view, &read.width, &read.region.view, &read.destinations.view, &read.check, &read.deadline_ns))
        return nullptr;
    return guarded(PyExc_RuntimeError, [&]() -> PyObject* {
        read.prepare();
        const wire::Capability capability = capability_of(shown);
        std::vector<uint8_t> statuses(read.wanted.size());
        {
            const Unlocked unlocked;
            client_of(self).read({capability, epoch, read.wanted.data(), read.blocks, read.to.data(), read.check != 0,
                                  read.deadline_ns},
                                 statuses.data());
        }
        return bytes_from(statuses);
    });
}

PyObject* connection_broken(PyObject* self, void*) { return PyBool_FromLong(client_of(self).broken()); }

PyObject* connection_close(PyObject* self, PyObject*) {
    client_of(self).close();
    Py_RETURN_NONE;
}

PyMethodDef connection_methods[] = {
    {"read", method(connection_read), METH_VARARGS | METH_KEYWORDS, "Verified read into slots of ours."},
    {"close", connection_close, METH_NOARGS, "Ends the connection; a read in progress ends with PEER_LOST."},
    {nullptr, nullptr, 0, nullptr},
};
PyGetSetDef connection_properties[] = {{"broken", connection_broken, nullptr, "No read can succeed any more.", nullptr},
                                       {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot connection_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(connection_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(connection_dealloc)},
    {Py_tp_methods, connection_methods},
    {Py_tp_getset, connection_properties},
    {Py_tp_doc, const_cast<char*>("Reader's side of the tcp plane.")},
    {0, nullptr},
};
PyType_Spec connection_spec = {"peer_agent._native.TcpConnection", sizeof(ConnectionObject), 0, Py_TPFLAGS_DEFAULT, connection_slots};

}  // namespace

PyObject* new_connection(PyObject* type, std::unique_ptr<TcpClient> client) {
    auto* self = reinterpret_cast<ConnectionObject*>(allocate(reinterpret_cast<PyTypeObject*>(type)));
    if (self == nullptr) return nullptr;
    self->client = client.release();
    return reinterpret_cast<PyObject*>(self);
}

wire::Capability capability_of(const Buffer& buffer) {
    wire::Capability capability{};
    if (buffer.bytes() != sizeof capability)
        throw std::invalid_argument("a capability of " + std::to_string(buffer.bytes()) + " bytes, not " +
                                    std::to_string(sizeof capability));
    std::memcpy(&capability, buffer.data(), sizeof capability);
    return capability;
}

void require_target(int port, uint64_t deadline_ns) {
    if (port < 1 || port > 65535) throw std::invalid_argument("port " + std::to_string(port) + " is not in 1..65535");
    if (deadline_ns == 0) throw std::invalid_argument("deadline_ns is 0; every connect has a deadline");
}

TcpClient& client_of(PyObject* connection) { return *reinterpret_cast<ConnectionObject*>(connection)->client; }

int add_tcp_types(PyObject* module) {
    if (add_type(module, "TcpServer", &server_spec, nullptr) != 0) return -1;
    return add_type(module, "TcpConnection", &connection_spec, nullptr);
}

}  // namespace kvdir::binding
