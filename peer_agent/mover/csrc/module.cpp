// peer_agent.mover._ucx: Python face of the UCX worker. Signatures and contracts: peer_agent/mover/_ucx.pyi.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "worker.hpp"

namespace kvdir::ucx {
namespace {

struct Object {
    PyObject_HEAD
    std::unique_ptr<Worker> worker;
};

Worker& worker_of(PyObject* self) { return *reinterpret_cast<Object*>(self)->worker; }

struct Buffer {
    Py_buffer view{};
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() {
        if (view.obj != nullptr) PyBuffer_Release(&view);
    }
    size_t bytes() const { return static_cast<size_t>(view.len); }
    std::string text() const { return {static_cast<const char*>(view.buf), bytes()}; }
};

template <typename Body>
PyObject* guarded(Body body) {
    try {
        return body();
    } catch (const std::invalid_argument& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

Incarnation incarnation_of(const Buffer& buffer) {
    Incarnation incarnation;
    if (buffer.bytes() != incarnation.size())
        throw std::invalid_argument("an incarnation has 16 bytes, not " + std::to_string(buffer.bytes()));
    std::memcpy(incarnation.data(), buffer.view.buf, incarnation.size());
    return incarnation;
}

std::vector<uint64_t> words(const Buffer& buffer) {
    if (buffer.bytes() % 8 != 0) throw std::invalid_argument("packed u64 of " + std::to_string(buffer.bytes()) + " bytes");
    std::vector<uint64_t> items(buffer.bytes() / 8);
    if (!items.empty()) std::memcpy(items.data(), buffer.view.buf, buffer.bytes());
    return items;
}

std::vector<std::pair<std::string, std::string>> settings_of(PyObject* pairs) {
    std::vector<std::pair<std::string, std::string>> settings;
    const Py_ssize_t count = PyTuple_Size(pairs);
    for (Py_ssize_t i = 0; i < count; ++i) {
        const char *name = nullptr, *value = nullptr;
        if (!PyArg_ParseTuple(PyTuple_GetItem(pairs, i), "ss", &name, &value)) throw std::invalid_argument("settings are (name, value)");
        settings.emplace_back(name, value);
    }
    return settings;
}

PyObject* bytes_of(const std::string& text) { return PyBytes_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())); }

PyObject* worker_new(PyTypeObject* type, PyObject* args, PyObject*) {
    const char* path = nullptr;
    PyObject* settings = nullptr;
    Buffer incarnation;
    if (!PyArg_ParseTuple(args, "sO!y*:Worker", &path, &PyTuple_Type, &settings, &incarnation.view)) return nullptr;
    return guarded([&]() -> PyObject* {
        const Api& api = Api::load(path);
        auto worker = std::make_unique<Worker>(api, settings_of(settings), incarnation_of(incarnation));
        const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
        PyObject* self = allocate(type, 0);
        if (self != nullptr) new (&reinterpret_cast<Object*>(self)->worker) std::unique_ptr<Worker>(std::move(worker));
        return self;
    });
}

void worker_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    reinterpret_cast<Object*>(self)->worker.~unique_ptr();
    const auto release = reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free));
    release(self);
    Py_DECREF(type);
}

PyObject* worker_fileno(PyObject* self, PyObject*) { return PyLong_FromLong(worker_of(self).event_fd()); }

PyObject* worker_address(PyObject* self, PyObject*) {
    return guarded([&] { return bytes_of(worker_of(self).address()); });
}

PyObject* worker_map(PyObject* self, PyObject* args) {
    unsigned long long base = 0, bytes = 0;
    int serve = 0;
    if (!PyArg_ParseTuple(args, "KKp:map", &base, &bytes, &serve)) return nullptr;
    return guarded([&] { return bytes_of(worker_of(self).map(reinterpret_cast<void*>(base), bytes, serve != 0)); });
}

PyObject* worker_progress(PyObject* self, PyObject* args) {
    unsigned long long budget_ns = 0;
    if (!PyArg_ParseTuple(args, "K:progress", &budget_ns)) return nullptr;
    return guarded([&]() -> PyObject* {
        Worker& worker = worker_of(self);
        const bool idle = worker.progress(budget_ns);
        const std::vector<Event> events = worker.take_events();
        PyObject* list = PyList_New(static_cast<Py_ssize_t>(events.size()));
        for (size_t i = 0; list != nullptr && i < events.size(); ++i) {
            PyObject* pair = Py_BuildValue("(KL)", static_cast<unsigned long long>(events[i].ticket), static_cast<long long>(events[i].status));
            if (pair == nullptr || PyList_SetItem(list, static_cast<Py_ssize_t>(i), pair) != 0) {
                Py_DECREF(list);
                return nullptr;
            }
        }
        return list == nullptr ? nullptr : Py_BuildValue("(NN)", PyBool_FromLong(idle), list);
    });
}

PyObject* worker_connect(PyObject* self, PyObject* args) {
    Buffer address, key, incarnation;
    unsigned long long ticket = 0;
    if (!PyArg_ParseTuple(args, "y*y*y*K:connect", &address.view, &key.view, &incarnation.view, &ticket)) return nullptr;
    return guarded([&] {
        return PyLong_FromUnsignedLongLong(worker_of(self).connect(address.text(), key.text(), incarnation_of(incarnation), ticket));
    });
}

PyObject* worker_get(PyObject* self, PyObject* args) {
    Buffer to, from, lengths;
    unsigned long long link = 0, ticket = 0;
    if (!PyArg_ParseTuple(args, "Ky*y*y*K:get", &link, &to.view, &from.view, &lengths.view, &ticket)) return nullptr;
    return guarded([&]() -> PyObject* {
        const auto here = words(to), there = words(from), bytes = words(lengths);
        if (here.size() != there.size() || here.size() != bytes.size()) throw std::invalid_argument("gets of different numbers");
        std::vector<Get> gets(here.size());
        for (size_t i = 0; i < gets.size(); ++i) gets[i] = {here[i], there[i], bytes[i]};
        worker_of(self).get(link, gets, ticket);
        return Py_NewRef(Py_None);
    });
}

PyObject* worker_close(PyObject* self, PyObject* args) {
    unsigned long long link = 0, ticket = 0;
    if (!PyArg_ParseTuple(args, "KK:close", &link, &ticket)) return nullptr;
    return guarded([&]() -> PyObject* {
        worker_of(self).close(link, ticket);
        return Py_NewRef(Py_None);
    });
}

PyObject* worker_failed(PyObject* self, PyObject* link) {
    const unsigned long long number = PyLong_AsUnsignedLongLong(link);
    if (PyErr_Occurred() != nullptr) return nullptr;
    return PyBool_FromLong(worker_of(self).failed(number));
}

PyObject* worker_lanes(PyObject* self, PyObject* link) {
    const unsigned long long number = PyLong_AsUnsignedLongLong(link);
    if (PyErr_Occurred() != nullptr) return nullptr;
    return guarded([&]() -> PyObject* {
        PyObject* list = PyList_New(0);
        for (const Lane& lane : worker_of(self).lanes(number)) {
            PyObject* pair = Py_BuildValue("(ss)", lane.transport.c_str(), lane.device.c_str());
            const int rc = pair == nullptr || list == nullptr ? -1 : PyList_Append(list, pair);
            Py_XDECREF(pair);
            if (rc != 0) {
                Py_XDECREF(list);
                return nullptr;
            }
        }
        return list;
    });
}

PyObject* worker_reason(PyObject* self, PyObject* status) {
    const long number = PyLong_AsLong(status);
    if (PyErr_Occurred() != nullptr) return nullptr;
    return PyUnicode_FromString(worker_of(self).reason(number).c_str());
}

PyObject* py_version(PyObject*, PyObject* args) {
    const char* path = nullptr;
    if (!PyArg_ParseTuple(args, "s:version", &path)) return nullptr;
    return guarded([&] {
        const Api& api = Api::load(path);
        return Py_BuildValue("(III)", api.major, api.minor, api.release);
    });
}

PyMethodDef methods[] = {
    {"fileno", worker_fileno, METH_NOARGS, nullptr},   {"address", worker_address, METH_NOARGS, nullptr},
    {"map", worker_map, METH_VARARGS, nullptr},        {"progress", worker_progress, METH_VARARGS, nullptr},
    {"connect", worker_connect, METH_VARARGS, nullptr}, {"get", worker_get, METH_VARARGS, nullptr},
    {"close", worker_close, METH_VARARGS, nullptr},    {"failed", worker_failed, METH_O, nullptr},
    {"lanes", worker_lanes, METH_O, nullptr},          {"reason", worker_reason, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot type_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(worker_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(worker_dealloc)},
    {Py_tp_methods, methods},
    {0, nullptr},
};
PyType_Spec type_spec = {"peer_agent.mover._ucx.Worker", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, type_slots};

int exec(PyObject* module) {
    PyObject* type = PyType_FromModuleAndSpec(module, &type_spec, nullptr);
    if (type == nullptr) return -1;
    const int rc = PyModule_AddObjectRef(module, "Worker", type);
    Py_DECREF(type);
    return rc;
}

PyMethodDef functions[] = {{"version", py_version, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(exec)}, {0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_ucx", "One UCX worker.", 0, functions, slots, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace kvdir::ucx

PyMODINIT_FUNC PyInit__ucx() { return PyModuleDef_Init(&kvdir::ucx::definition); }
