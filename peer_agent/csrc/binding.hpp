// What the Python binding files share: buffers, exceptions, the GIL. The only headers with Python in them are included here.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "copy.hpp"
#include "slot.hpp"
#include "stream.hpp"
#include "tls.hpp"
#include "wire.hpp"

namespace kvdir {
class TcpClient;
}

namespace kvdir::binding {

// Holds a buffer for as long as native code uses it. Filled by "y*" (readable) or "w*" (writable).
struct Buffer {
    Py_buffer view{};
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() {
        if (view.obj != nullptr) PyBuffer_Release(&view);
    }
    size_t bytes() const { return static_cast<size_t>(view.len); }
    const uint8_t* data() const { return static_cast<const uint8_t*>(view.buf); }
    uint8_t* writable() const { return static_cast<uint8_t*>(view.buf); }
    Region region() const { return Region(view.buf, bytes()); }
};

// The GIL is released in its scope. Exceptions may pass through.
class Unlocked {
  public:
    Unlocked() : state_(PyEval_SaveThread()) {}
    ~Unlocked() { PyEval_RestoreThread(state_); }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

  private:
    PyThreadState* state_;
};

// Aligned copy of a packed buffer. `what` is named when its size is not a multiple of the element's.
template <typename T>
std::vector<T> unpack(const Buffer& buffer, const char* what) {
    if (buffer.bytes() % sizeof(T) != 0)
        throw std::invalid_argument(std::string(what) + " holds " + std::to_string(buffer.bytes()) + " bytes, not a multiple of " +
                                    std::to_string(sizeof(T)));
    std::vector<T> items(buffer.bytes() / sizeof(T));
    if (!items.empty()) std::memcpy(items.data(), buffer.data(), buffer.bytes());
    return items;
}

// One capability of the tcp plane. std::invalid_argument unless it has the size of one.
wire::Capability capability_of(const Buffer& buffer);

// Throws std::invalid_argument unless as many items (`what`) came as there are records.
void require_count(size_t found, size_t wanted, const char* what);

// Checks that namespace digest and fingerprints describe exactly `count` blocks.
Blocks blocks_of(const Buffer& namespace_digest, const Buffer& fingerprints, unsigned int width, size_t count);

// The arguments that every read into slots of ours has, from parsed buffers to checked native lists. `prepare` throws
// std::invalid_argument and must have succeeded before anything else is used. Lives as long as the read.
struct SlotRead {
    Buffer records, digest, fingerprints, region, destinations;
    unsigned int width = 0;
    int check = 0;
    unsigned long long deadline_ns = 0;

    std::vector<Record> wanted;
    Blocks blocks{};
    std::vector<uint8_t*> to;

    // Payload bytes of all present records. May come before `prepare`.
    uint64_t asked_bytes();
    void prepare();

  private:
    void unpack_records();
};

// New bytes object with the elements' bytes; null with MemoryError set.
template <typename T>
PyObject* bytes_from(const std::vector<T>& items) {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(items.data()), static_cast<Py_ssize_t>(items.size() * sizeof(T)));
}

// Runs `body`, turning C++ exceptions into Python ones: std::invalid_argument -> ValueError, std::runtime_error ->
// `runtime_error` (borrowed), memory -> MemoryError.
template <typename Body>
PyObject* guarded(PyObject* runtime_error, Body body) {
    try {
        return body();
    } catch (const std::invalid_argument& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& error) {
        PyErr_SetString(runtime_error, error.what());
    }
    return nullptr;
}

// PyArg_ParseTupleAndKeywords with const keyword names.
template <typename... Targets>
bool parse(PyObject* args, PyObject* kwargs, const char* format, const char* const* names, Targets... targets) {
    return PyArg_ParseTupleAndKeywords(args, kwargs, format, const_cast<char**>(names), targets...) != 0;
}

template <typename Function>
PyCFunction method(Function function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// A new object of a heap type, zeroed, and its end; for tp_new and tp_dealloc.
PyObject* allocate(PyTypeObject* type);
void free_object(PyObject* self);

// Adds a type to the module under `name`; -1 with an exception set on failure. `type` (may be null) gets a new reference.
int add_type(PyObject* module, const char* name, PyType_Spec* spec, PyObject** type);

// module_tcp.cpp: TcpServer and TcpConnection. module_movers.cpp: Movers. module_gets.cpp and module_device.cpp: functions. -1
// with an exception set on failure.
int add_gets_functions(PyObject* module);
int add_device_functions(PyObject* module);
int add_tcp_types(PyObject* module);
int add_movers_type(PyObject* module);
int add_tls_type(PyObject* module);      // module_tls.cpp: TlsCredentials
int add_mapping_type(PyObject* module);  // module_mapping.cpp: Mapping

// What a `tls` argument means: a TlsCredentials object, or none (null too). std::invalid_argument for anything else.
MakeStream stream_maker(PyObject* tls, tls::Side side);

// A TcpConnection object of `type`; null with an exception set.
PyObject* new_connection(PyObject* type, std::unique_ptr<TcpClient> client);
// std::invalid_argument unless one can connect to it.
void require_target(int port, uint64_t deadline_ns);

// The connection behind a TcpConnection object; the caller has checked its type and holds a reference.
TcpClient& client_of(PyObject* connection);

}  // namespace kvdir::binding
