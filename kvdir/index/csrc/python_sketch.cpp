// kvdir.index._native.Sketch and GatherFloor.
#include "gather.hpp"
#include "python.hpp"

namespace kvdir::python {

namespace {

PyObject* sketch_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"cells", nullptr};
    PyObject* cells_object = nullptr;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:Sketch", const_cast<char**>(names), &cells_object)) return nullptr;
    u64 cells = 1024;
    if (cells_object && !to_u64(cells_object, "cells", Sketch::kMinCells, Sketch::kMaxCells, cells)) return nullptr;
    if (cells % Sketch::kRegions != 0) {
        PyErr_SetString(PyExc_ValueError, "cells must be a multiple of 4, one part per hash region");
        return nullptr;
    }
    return construct<Sketch>(type, static_cast<u32>(cells));
}

template <void (Sketch::*change)(const Fingerprints&)>
PyObject* sketch_change(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"fingerprints", "width", nullptr};
    PyObject *data, *width;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO", const_cast<char**>(names), &data, &width)) return nullptr;
    FingerprintsArgument blocks;
    if (!blocks.open(data, width)) return nullptr;
    if (!locked<Sketch>(self, [&](Sketch& sketch) { (sketch.*change)(*blocks); })) return nullptr;
    Py_RETURN_NONE;
}

PyObject* sketch_clear(PyObject* self, PyObject*) {
    if (!locked<Sketch>(self, [](Sketch& sketch) { sketch.clear(); })) return nullptr;
    Py_RETURN_NONE;
}

PyObject* sketch_copy(PyObject* self, PyObject*) {
    Ref copy(construct<Sketch>(Py_TYPE(self), Sketch::kMinCells));
    if (!copy) return nullptr;
    Sketch& target = guarded<Sketch>(copy.get()).core;
    if (!locked<Sketch>(self, [&](Sketch& sketch) { target = sketch; })) return nullptr;
    return copy.take();
}

PyObject* sketch_folded(PyObject* self, PyObject* argument) {
    unsigned long cells = PyLong_AsUnsignedLong(argument);
    if (cells == static_cast<unsigned long>(-1) && PyErr_Occurred()) return nullptr;
    Ref folded(construct<Sketch>(Py_TYPE(self), Sketch::kMinCells));
    if (!folded) return nullptr;
    Sketch& target = guarded<Sketch>(folded.get()).core;
    bool fits = false;
    auto fold = [&](Sketch& sketch) {
        fits = cells >= Sketch::kMinCells && cells % Sketch::kRegions == 0 && cells <= sketch.cells() && sketch.cells() % cells == 0;
        if (fits) target = sketch.folded(static_cast<u32>(cells));
    };
    if (!locked<Sketch>(self, fold)) return nullptr;
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "cells of a folded sketch must be a multiple of 4 that divides the cells it has");
        return nullptr;
    }
    return folded.take();
}

PyObject* sketch_count(PyObject* self, void*) {
    u64 count = 0;
    if (!locked<Sketch>(self, [&](Sketch& sketch) { count = sketch.count(); })) return nullptr;
    return PyLong_FromLongLong(static_cast<long long>(count));
}

PyObject* sketch_digest(PyObject* self, void*) {
    u64 digest[2];
    if (!locked<Sketch>(self, [&](Sketch& sketch) { digest[0] = sketch.digest()[0], digest[1] = sketch.digest()[1]; }))
        return nullptr;
    return to_bytes(digest, sizeof digest);
}

PyObject* sketch_encode(PyObject* self, PyObject*) {
    std::vector<u8> out;
    auto encode = [&](Sketch& sketch) {
        out.resize(sketch.encoded_bytes());
        sketch.encode(out.data());
    };
    return locked<Sketch>(self, encode) ? to_bytes(out) : nullptr;
}

const char* complaint(Sketch::Decoded outcome) {
    switch (outcome) {
        case Sketch::Decoded::wrong_size: return "other sketch has another number of cells: use the same on both sides";
        case Sketch::Decoded::wrong_version: return "other sketch has an unknown version: upgrade the older side";
        case Sketch::Decoded::damaged: return "other is not an encoded sketch, or it was damaged: fetch it again";
        default: return nullptr;
    }
}

PyObject* sketch_difference(PyObject* self, PyObject* other) {
    Buffer buffer;
    if (!buffer.open(other, "other")) return nullptr;
    Difference difference;
    Sketch::Decoded outcome{};
    auto subtract = [&](Sketch& sketch) { outcome = sketch.difference(buffer.data(), buffer.bytes(), difference); };
    if (!locked<Sketch>(self, subtract)) return nullptr;
    if (const char* what = complaint(outcome)) {
        PyErr_SetString(PyExc_ValueError, what);
        return nullptr;
    }
    if (outcome == Sketch::Decoded::too_large) Py_RETURN_NONE;
    Ref here(to_bytes(difference.here));
    Ref there(to_bytes(difference.there));
    return here && there ? PyTuple_Pack(2, here.get(), there.get()) : nullptr;
}

PyCFunction with_keywords(PyObject* (*function)(PyObject*, PyObject*, PyObject*)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef sketch_methods[] = {
    {"insert", with_keywords(sketch_change<&Sketch::insert>), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"remove", with_keywords(sketch_change<&Sketch::remove>), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"clear", sketch_clear, METH_NOARGS, nullptr},
    {"copy", sketch_copy, METH_NOARGS, nullptr},
    {"folded", sketch_folded, METH_O, nullptr},
    {"encode", sketch_encode, METH_NOARGS, nullptr},
    {"difference", sketch_difference, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef sketch_properties[] = {
    {"count", sketch_count, nullptr, "Items inserted minus removed.", nullptr},
    {"digest", sketch_digest, nullptr, "16 bytes, independent of order.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot sketch_slots[] = {
    {Py_tp_doc, const_cast<char*>("Invertible Bloom lookup table and digest of a set of fingerprints; see kvdir.index.BlockSketch.")},
    {Py_tp_new, reinterpret_cast<void*>(sketch_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<Sketch>)},
    {Py_tp_methods, sketch_methods},
    {Py_tp_getset, sketch_properties},
    {0, nullptr},
};

// --- benchmarks ----------------------------------------------------------------------------------------------------------

PyObject* gather_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"slots", nullptr};
    PyObject* slots_object;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:GatherFloor", const_cast<char**>(names), &slots_object)) return nullptr;
    u64 slots;
    if (!to_u64(slots_object, "slots", 1, u64{1} << 32, slots)) return nullptr;
    return construct<GatherFloor>(type, slots);
}

PyObject* gather_read(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"fingerprints", "width", nullptr};
    PyObject *data, *width;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:read", const_cast<char**>(names), &data, &width)) return nullptr;
    FingerprintsArgument blocks;
    if (!blocks.open(data, width)) return nullptr;
    u64 sum = 0;
    if (!locked<GatherFloor>(self, [&](GatherFloor& floor) { sum = floor.read(*blocks); })) return nullptr;
    return PyLong_FromUnsignedLongLong(sum);
}

PyMethodDef gather_methods[] = {
    {"read", with_keywords(gather_read), METH_VARARGS | METH_KEYWORDS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot gather_slots[] = {
    {Py_tp_doc, const_cast<char*>("Benchmarks only: random 16-byte reads with prefetch over a table of so many slots.")},
    {Py_tp_new, reinterpret_cast<void*>(gather_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<GatherFloor>)},
    {Py_tp_methods, gather_methods},
    {0, nullptr},
};

}  // namespace

PyType_Spec sketch_spec = {"kvdir.index._native.Sketch", sizeof(Object<Sketch>), 0, Py_TPFLAGS_DEFAULT, sketch_slots};
PyType_Spec gather_floor_spec = {"kvdir.index._native.GatherFloor", sizeof(Object<GatherFloor>), 0, Py_TPFLAGS_DEFAULT,
                                 gather_slots};

}  // namespace kvdir::python
