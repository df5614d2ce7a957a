#include "python.hpp"

namespace kvdir::python {

bool Buffer::open(PyObject* object, const char* name) {
    if (!PyObject_CheckBuffer(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be a buffer (bytes, memoryview, numpy array, ...), not %R", name,
                     reinterpret_cast<PyObject*>(Py_TYPE(object)));
        return false;
    }
    if (PyObject_GetBuffer(object, &view_, PyBUF_SIMPLE) == 0) return held_ = true;
    if (PyErr_ExceptionMatches(PyExc_BufferError) || PyErr_ExceptionMatches(PyExc_ValueError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s must be one contiguous piece of memory: pass a packed copy, e.g. bytes(...)", name);
    }
    return false;
}

bool FingerprintsArgument::open(PyObject* fingerprints, PyObject* width_object) {
    u64 width;
    if (!to_u64(width_object, "width", 0, ~u64{0}, width)) return false;
    if (width != 8 && width != 16 && width != 32) {
        PyErr_Format(PyExc_ValueError, "width must be 8, 16 or 32 bytes, not %llu", static_cast<unsigned long long>(width));
        return false;
    }
    if (!buffer_.open(fingerprints, "fingerprints")) return false;
    if (buffer_.bytes() % width != 0) {
        PyErr_Format(PyExc_ValueError, "fingerprints are %llu bytes, which is not a multiple of the width %llu",
                     static_cast<unsigned long long>(buffer_.bytes()), static_cast<unsigned long long>(width));
        return false;
    }
    value_ = {buffer_.data(), buffer_.bytes() / width, static_cast<u32>(width)};
    if (value_.count <= ~u32{0}) return true;
    PyErr_SetString(PyExc_ValueError, "fingerprints: at most 2**32 - 1 in one call, split the batch");
    return false;
}

bool to_u64(PyObject* object, const char* name, u64 least, u64 most, u64& out) {
    if (!object) {
        PyErr_Format(PyExc_TypeError, "missing keyword argument '%s'", name);
        return false;
    }
    Ref number(PyNumber_Index(object));
    if (!number) return false;
    unsigned long long value = PyLong_AsUnsignedLongLong(number.get());
    bool overflow = value == ~0ULL && PyErr_Occurred();
    if (overflow && !PyErr_ExceptionMatches(PyExc_OverflowError)) return false;
    PyErr_Clear();
    if (overflow || value < least || value > most) {
        PyErr_Format(PyExc_ValueError, "%s must be between %llu and %llu, not %S", name, static_cast<unsigned long long>(least),
                     static_cast<unsigned long long>(most), number.get());
        return false;
    }
    out = value;
    return true;
}

void raise_region_error(const char* message) {
    Ref answers(PyImport_ImportModule("kvdir.index.answers"));
    Ref type(answers ? PyObject_GetAttrString(answers.get(), "RegionError") : nullptr);
    if (type) PyErr_SetString(type.get(), message);
}

void require_usable(const Index& index) {
    if (index.region().closed()) throw RegionError("this region is closed: create a new one");
}

void require_ours(const Index& index) {
    const RegionFile* file = index.region().file();
    if (file && !file->created_here()) {
        throw RegionError("region " + file->place().path + " belongs to the process that forked this one: open it with RegionReader");
    }
}

PyObject* to_stats(PyObject* self, const Stats& stats) {
    using number = unsigned long long;
    return PyObject_CallFunction(state_of(self).stats_type, "KKKKKO", static_cast<number>(stats.blocks),
                                 static_cast<number>(stats.capacity), static_cast<number>(stats.bytes),
                                 static_cast<number>(stats.sets), static_cast<number>(stats.holders),
                                 stats.growing ? Py_True : Py_False);
}

PyObject* to_packed_sets(PyObject* container, const SetList& sets, int (*put)(PyObject*, Py_ssize_t, PyObject*)) {
    Ref list(container);
    if (!list) return nullptr;
    u64 start = 0;
    for (std::size_t i = 0; i < sets.ends.size(); ++i) {
        PyObject* holders = to_bytes(sets.holders.data() + start, (sets.ends[i] - start) * sizeof(u32));
        if (!holders) return nullptr;
        put(list.get(), static_cast<Py_ssize_t>(i), holders);
        start = sets.ends[i];
    }
    return list.take();
}

bool to_bound(PyObject* object, u64& out) {
    if (!to_u64(object, "max_bytes", 0, ~u64{0}, out)) return false;
    if (out == 0 || out >= Index::kLeastBytes) return true;
    PyErr_Format(PyExc_ValueError, "max_bytes must be 0 (no bound) or at least %llu, not %llu",
                 static_cast<unsigned long long>(Index::kLeastBytes), static_cast<unsigned long long>(out));
    return false;
}

bool to_path(PyObject* object, std::string& out) {
    PyObject* encoded = nullptr;
    if (!PyUnicode_FSConverter(object, &encoded)) return false;
    Ref owned(encoded);
    out = PyBytes_AsString(encoded);
    return true;
}

PyObject* to_bytes(const void* data, u64 bytes) {
    return PyBytes_FromStringAndSize(static_cast<const char*>(data), static_cast<Py_ssize_t>(bytes));
}

}  // namespace kvdir::python
