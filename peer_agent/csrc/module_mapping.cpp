// peer_agent._native.Mapping. Contract: peer_agent/_native.pyi.
#include <memory>
#include <system_error>

#include "binding.hpp"
#include "mapping.hpp"

namespace kvdir::binding {
namespace {

struct MappingObject {
    PyObject_HEAD
    Mapping* mapping;  // null once closed
    size_t bytes;      // what was asked for, and what buffers show
    bool writable;
    Py_ssize_t exports;
};

MappingObject* self_of(PyObject* object) { return reinterpret_cast<MappingObject*>(object); }

// Runs `body`, which needs an open mapping; std::system_error becomes OSError with its errno.
template <typename Body>
PyObject* with_mapping(PyObject* self, Body body) {
    if (self_of(self)->mapping == nullptr) {
        PyErr_SetString(PyExc_ValueError, "the mapping is closed");
        return nullptr;
    }
    try {
        return body(*self_of(self)->mapping);
    } catch (const std::system_error& error) {
        errno = error.code().value();
        return PyErr_SetFromErrno(PyExc_OSError);
    }
}

PyObject* mapping_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"fd", "size", "writable", nullptr};
    int fd = -1, writable = 0;
    Py_ssize_t size = 0;
    if (!parse(args, kwargs, "in$p:Mapping", names, &fd, &size, &writable)) return nullptr;
    if (size <= 0) {
        PyErr_SetString(PyExc_ValueError, "size must be positive");
        return nullptr;
    }
    try {
        auto mapping = std::make_unique<Mapping>(fd, static_cast<size_t>(size), writable != 0);
        PyObject* self = allocate(type);
        if (self == nullptr) return nullptr;
        self_of(self)->mapping = mapping.release();
        self_of(self)->bytes = static_cast<size_t>(size);
        self_of(self)->writable = writable != 0;
        return self;
    } catch (const std::system_error& error) {
        errno = error.code().value();
        return PyErr_SetFromErrno(PyExc_OSError);
    }
}

void mapping_dealloc(PyObject* self) {
    delete self_of(self)->mapping;
    free_object(self);
}

int mapping_get_buffer(PyObject* object, Py_buffer* view, int flags) {
    MappingObject* const self = self_of(object);
    if (self->mapping == nullptr) {
        view->obj = nullptr;
        PyErr_SetString(PyExc_ValueError, "the mapping is closed");
        return -1;
    }
    const int rc = PyBuffer_FillInfo(view, object, self->mapping->data(), static_cast<Py_ssize_t>(self->bytes), !self->writable, flags);
    if (rc == 0) ++self->exports;
    return rc;
}

void mapping_release_buffer(PyObject* self, Py_buffer*) { --self_of(self)->exports; }

PyObject* mapping_bind(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"node", nullptr};
    int node = -1;
    if (!parse(args, kwargs, "i:bind", names, &node)) return nullptr;
    return with_mapping(self, [&](Mapping& mapping) {
        mapping.bind(node);
        return Py_NewRef(Py_None);
    });
}

PyObject* mapping_advise_huge(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"wanted", nullptr};
    int wanted = 0;
    if (!parse(args, kwargs, "p:advise_huge", names, &wanted)) return nullptr;
    return with_mapping(self, [&](Mapping& mapping) {
        mapping.advise_huge(wanted != 0);
        return Py_NewRef(Py_None);
    });
}

PyObject* mapping_prefault(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"huge", "threads", nullptr};
    int huge = 0;
    unsigned int threads = 1;
    if (!parse(args, kwargs, "$pI:prefault", names, &huge, &threads)) return nullptr;
    return with_mapping(self, [&](Mapping& mapping) {
        {
            const Unlocked unlocked;
            mapping.prefault(huge != 0, threads);
        }
        return Py_NewRef(Py_None);
    });
}

PyObject* mapping_remove(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"offset", nullptr};
    Py_ssize_t offset = 0;
    if (!parse(args, kwargs, "n:remove", names, &offset)) return nullptr;
    if (offset < 0) {
        PyErr_SetString(PyExc_ValueError, "offset must not be negative");
        return nullptr;
    }
    return with_mapping(self, [&](Mapping& mapping) {
        mapping.remove(static_cast<size_t>(offset));
        return Py_NewRef(Py_None);
    });
}

PyObject* mapping_close(PyObject* self, PyObject*) {
    if (self_of(self)->exports != 0) {
        PyErr_SetString(PyExc_BufferError, "the mapping is in use");
        return nullptr;
    }
    delete std::exchange(self_of(self)->mapping, nullptr);
    Py_RETURN_NONE;
}

PyObject* mapping_address(PyObject* self, void*) {
    return with_mapping(self, [](Mapping& mapping) { return PyLong_FromVoidPtr(mapping.data()); });
}

PyObject* mapping_page_bytes(PyObject* self, void*) {
    return with_mapping(self, [](Mapping& mapping) { return PyLong_FromSize_t(mapping.page_bytes()); });
}

PyMethodDef methods[] = {
    {"bind", method(mapping_bind), METH_VARARGS | METH_KEYWORDS, "New pages come from this NUMA node only."},
    {"advise_huge", method(mapping_advise_huge), METH_VARARGS | METH_KEYWORDS, "Huge pages wanted, or not wanted; a hint."},
    {"prefault", method(mapping_prefault), METH_VARARGS | METH_KEYWORDS, "Allocates, zeroes and maps everything."},
    {"remove", method(mapping_remove), METH_VARARGS | METH_KEYWORDS, "Gives memory back; whoever maps it finds zeros."},
    {"close", mapping_close, METH_NOARGS, "Unmaps; BufferError while buffers are in use."},
    {nullptr, nullptr, 0, nullptr},
};
PyGetSetDef properties[] = {{"address", mapping_address, nullptr, "Where it lies.", nullptr},
                            {"page_bytes", mapping_page_bytes, nullptr, "Page size of the file's memory.", nullptr},
                            {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(mapping_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(mapping_dealloc)},
    {Py_bf_getbuffer, reinterpret_cast<void*>(mapping_get_buffer)},
    {Py_bf_releasebuffer, reinterpret_cast<void*>(mapping_release_buffer)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_doc, const_cast<char*>("A file mapped shared, where huge pages can be mapped as such.")},
    {0, nullptr},
};
PyType_Spec spec = {"peer_agent._native.Mapping", sizeof(MappingObject), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

int add_mapping_type(PyObject* module) { return add_type(module, "Mapping", &spec, nullptr); }

}  // namespace kvdir::binding
