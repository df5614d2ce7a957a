// kvdir.index._native.RegionIndex: an Index whose memory is a file, and its roster.
#include <cstring>

#include "python.hpp"
#include "roster.hpp"

namespace kvdir::python {

namespace {

constexpr u64 kNodes = kNodeLimit - 1;
constexpr u64 kModes = 0777;

RegionFile& file_of(Index& index) { return *index.region().file(); }

// A new object around a new region; nullptr with a Python error set.
PyObject* make(PyTypeObject* type, const RegionPlace& place, u64 expected, u64 seed) {
    auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    Ref self(allocate(type, 0));
    if (!self) return nullptr;
    auto*& held = reinterpret_cast<Object<Index>*>(self.get())->guarded;
    return without_gil([&] { held = new Guarded<Index>(place, expected, seed); }) ? self.take() : nullptr;
}

PyObject* region_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"path", "expected_blocks", "seed", "max_bytes", "mode", "release", nullptr};
    PyObject *path, *expected_object = nullptr, *seed_object = nullptr, *most_object = nullptr, *mode_object = nullptr;
    const char* release = "unknown";
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$OOOOs:RegionIndex", keywords(names), &path, &expected_object, &seed_object,
                                     &most_object, &mode_object, &release))
        return nullptr;
    RegionPlace place;
    u64 expected = 0, seed = 0, mode = place.mode;
    if (expected_object && !to_u64(expected_object, "expected_blocks", 0, kExpected, expected)) return nullptr;
    if (seed_object && !to_u64(seed_object, "seed", 0, kAny, seed)) return nullptr;
    if (most_object && !to_bound(most_object, place.max_bytes)) return nullptr;
    if (mode_object && !to_u64(mode_object, "mode", 0, kModes, mode)) return nullptr;
    if (mode & 022) {
        PyErr_SetString(PyExc_ValueError, "mode lets others than the writer write, so readers would refuse it: at most 0o755");
        return nullptr;
    }
    if (!to_path(path, place.path)) return nullptr;
    place.mode = static_cast<u32>(mode);
    place.release = release;
    return make(type, place, expected, seed);
}

PyObject* region_successor(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"expected_blocks", "seed", nullptr};
    PyObject *expected_object = nullptr, *seed_object = nullptr;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OO:successor", keywords(names), &expected_object, &seed_object)) return nullptr;
    u64 expected = 0, seed = 0;
    if (expected_object && !to_u64(expected_object, "expected_blocks", 0, kExpected, expected)) return nullptr;
    if (seed_object && !to_u64(seed_object, "seed", 0, kAny, seed)) return nullptr;
    RegionPlace place;
    if (!locked<Index>(self, [&](Index& index) { place = file_of(index).place(); })) return nullptr;
    return make(Py_TYPE(self), place, expected, seed);
}

// Short work on the index that answers nothing.
template <class Work>
PyObject* quietly(PyObject* self, Work work) {
    if (!locked_briefly<Index>(self, work)) return nullptr;
    Py_RETURN_NONE;
}

PyObject* region_publish(PyObject* self, PyObject*) {
    return quietly(self, [](Index& index) { file_of(index).publish(); });
}

PyObject* region_retire(PyObject* self, PyObject*) {
    return quietly(self, [](Index& index) { index.region().retire(); });
}

PyObject* region_close(PyObject* self, PyObject*) {
    Guarded<Index>& held = guarded<Index>(self);
    bool done = without_gil([&] {
        std::unique_lock<std::mutex> lock(held.mutex, std::defer_lock);
        if (file_of(held.core).created_here()) lock.lock();
        held.core.region().close();
    });
    if (!done) return nullptr;
    Py_RETURN_NONE;
}

PyObject* region_set_holder(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"number", "node", "tier", "visible", nullptr};
    PyObject *number_object, *node_object = nullptr, *tier_object = nullptr;
    int visible = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$OOp:set_holder", keywords(names), &number_object, &node_object, &tier_object,
                                     &visible))
        return nullptr;
    u64 number, node, tier;
    if (!to_u64(number_object, "number", 0, kHolders, number) || !to_u64(node_object, "node", 0, kNodes, node) ||
        !to_u64(tier_object, "tier", 0, 0xFF, tier))
        return nullptr;
    return quietly(self, [&](Index& index) {
        Roster(index.region()).set_holder(static_cast<u32>(number), static_cast<u32>(node), static_cast<u8>(tier), visible != 0);
    });
}

PyObject* region_clear_holder(PyObject* self, PyObject* object) {
    u64 number;
    if (!to_u64(object, "number", 0, kHolders, number)) return nullptr;
    return quietly(self, [&](Index& index) { Roster(index.region()).clear_holder(static_cast<u32>(number)); });
}

// A record of at most `most` bytes. False with a Python error set.
bool open_record(PyObject* object, const char* name, u64 most, Buffer& out) {
    if (!out.open(object, name)) return false;
    if (out.bytes() <= most) return true;
    PyErr_Format(PyExc_ValueError, "%s is %llu bytes, at most %llu fit: cut it", name,
                 static_cast<unsigned long long>(out.bytes()), static_cast<unsigned long long>(most));
    return false;
}

PyObject* region_set_node(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"slot", "record", nullptr};
    PyObject *slot_object, *record_object;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:set_node", keywords(names), &slot_object, &record_object)) return nullptr;
    u64 slot;
    Buffer record;
    if (!to_u64(slot_object, "slot", 0, kNodes, slot) || !open_record(record_object, "record", sizeof NodeEntry::record, record))
        return nullptr;
    return quietly(self, [&](Index& index) {
        Roster(index.region()).set_node(static_cast<u32>(slot), record.data(), static_cast<u32>(record.bytes()));
    });
}

PyObject* region_clear_node(PyObject* self, PyObject* object) {
    u64 slot;
    if (!to_u64(object, "slot", 0, kNodes, slot)) return nullptr;
    return quietly(self, [&](Index& index) { Roster(index.region()).clear_node(static_cast<u32>(slot)); });
}

PyObject* region_set_namespaces(PyObject* self, PyObject* object) {
    Buffer records;
    if (!open_record(object, "records", kNamespaceBytes - sizeof(Sheet), records)) return nullptr;
    bool fits = true;
    bool done = locked<Index>(self, [&](Index& index) {
        fits = Roster(index.region()).set_namespaces(records.data(), records.bytes());
    });
    if (done && !fits) PyErr_SetString(PyExc_ValueError, "records do not fit into this region, whose address space is limited");
    if (!done || !fits) return nullptr;
    Py_RETURN_NONE;
}

PyObject* region_beat(PyObject* self, PyObject* object) {
    Buffer record;
    if (!open_record(object, "record", kBeatBytes - sizeof(Sheet), record)) return nullptr;
    return quietly(self, [&](Index& index) { Roster(index.region()).beat(record.data(), static_cast<u32>(record.bytes())); });
}

PyObject* region_path(PyObject* self, void*) {
    std::string path;
    if (!locked_briefly<Index>(self, [&](Index& index) { path = file_of(index).place().path; })) return nullptr;
    return PyUnicode_DecodeFSDefault(path.c_str());
}

PyObject* region_generation(PyObject* self, void*) {
    u64 generation = 0;
    if (!locked_briefly<Index>(self, [&](Index& index) { generation = index.region().at<RegionHeader>(Segment::header)->generation; }))
        return nullptr;
    return PyLong_FromUnsignedLongLong(generation);
}

const PyMethodDef own_methods[] = {
    {"successor", with_keywords(region_successor), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"publish", region_publish, METH_NOARGS, nullptr},
    {"retire", region_retire, METH_NOARGS, nullptr},
    {"close", region_close, METH_NOARGS, nullptr},
    {"set_holder", with_keywords(region_set_holder), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"clear_holder", region_clear_holder, METH_O, nullptr},
    {"set_node", with_keywords(region_set_node), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"clear_node", region_clear_node, METH_O, nullptr},
    {"set_namespaces", region_set_namespaces, METH_O, nullptr},
    {"beat", region_beat, METH_O, nullptr},
};

// Those of Index and our own.
PyMethodDef* all_methods() {
    static PyMethodDef all[64] = {};
    PyMethodDef* at = all;
    for (const PyMethodDef* method = index_methods; method->ml_name; ++method) *at++ = *method;
    for (const PyMethodDef& method : own_methods) *at++ = method;
    return all;
}

PyGetSetDef properties[] = {
    {"path", region_path, nullptr, nullptr, nullptr},
    {"generation", region_generation, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot region_slots[] = {
    {Py_tp_doc, const_cast<char*>("Native block index in a file that other processes read; see kvdir.index.create_region.")},
    {Py_tp_new, reinterpret_cast<void*>(region_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<Index>)},
    {Py_tp_methods, all_methods()},
    {Py_tp_getset, properties},
    {0, nullptr},
};

}  // namespace

PyType_Spec region_index_spec = {"kvdir.index._native.RegionIndex", sizeof(Object<Index>), 0, Py_TPFLAGS_DEFAULT, region_slots};

}  // namespace kvdir::python
