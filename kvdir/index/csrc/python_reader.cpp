// kvdir.index._native.RegionReader: read-only lookups in the region of another process.
#include "python.hpp"
#include "view.hpp"

namespace kvdir::python {

namespace {

using View = std::shared_ptr<const RegionView>;

// `view` is touched under the GIL only; who reads has a share, so closing waits for nobody, and the last one unmaps. No lock, so
// none that a fork could find taken.
struct ReaderObject {
    PyObject_HEAD
    View* view;  // empty when closed
};

View& view_of(PyObject* self) { return *reinterpret_cast<ReaderObject*>(self)->view; }

PyObject* reader_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"path", nullptr};
    PyObject* path_object;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:RegionReader", keywords(names), &path_object)) return nullptr;
    std::string path;
    if (!to_path(path_object, path)) return nullptr;
    auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    Ref self(allocate(type, 0));
    if (!self) return nullptr;
    auto*& view = reinterpret_cast<ReaderObject*>(self.get())->view;
    return without_gil([&] { view = new View(new RegionView(path)); }) ? self.take() : nullptr;
}

void reader_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    delete reinterpret_cast<ReaderObject*>(self)->view;
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

// Lookups of up to so many blocks count as short work.
constexpr u64 kShortBlocks = 2048;

// Runs read(view); false with a Python error set when the reader is closed.
template <class Read>
bool reading(PyObject* self, Read read, Gil gil = Gil::kept) {
    View view = view_of(self);
    return run(gil, [&] {
        if (!view) throw RegionError("this reader is closed: open the region again");
        read(*view);
        view.reset();
    });
}

PyObject* reader_lookup(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"fingerprints", "width", "scope", "prefix", nullptr};
    PyObject *data, *width, *scope_object = nullptr;
    int prefix = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$Op:lookup", keywords(names), &data, &width, &scope_object, &prefix))
        return nullptr;
    FingerprintsArgument blocks;
    u64 scope;
    if (!blocks.open(data, width) || !to_u64(scope_object, "scope", 0, kAny, scope)) return nullptr;
    RegionAnswer answer;
    Gil gil = (*blocks).count <= kShortBlocks ? Gil::kept : Gil::released;
    if (!reading(self, [&](const RegionView& view) { answer = region_lookup(view, *blocks, scope, prefix != 0); }, gil)) return nullptr;
    Ref runs(to_bytes(answer.runs));
    Ref sets(to_packed_sets(PyTuple_New(static_cast<Py_ssize_t>(answer.sets.ends.size())), answer.sets, PyTuple_SetItem));
    Ref nodes(to_bytes(answer.nodes));
    if (!runs || !sets || !nodes) return nullptr;
    return PyObject_CallFunction(state_of(self).region_lookup_type, "OOOKO", runs.get(), sets.get(), nodes.get(),
                                 static_cast<unsigned long long>(answer.hits), answer.torn ? Py_True : Py_False);
}

// (version, record)
PyObject* to_pair(u64 version, const std::string& record) {
    Ref bytes(to_bytes(record.data(), version ? record.size() : 0));
    return bytes ? Py_BuildValue("(KO)", static_cast<unsigned long long>(version), bytes.get()) : nullptr;
}

PyObject* reader_node(PyObject* self, PyObject* object) {
    u64 id, version = 0;
    std::string record;
    if (!to_u64(object, "node", 0, ~u32{0}, id)) return nullptr;
    if (!reading(self, [&](const RegionView& view) { version = view.node(static_cast<u32>(id), record); })) return nullptr;
    return to_pair(version, record);
}

PyObject* reader_namespaces(PyObject* self, PyObject*) {
    u64 version = 0;
    std::string records;
    if (!reading(self, [&](const RegionView& view) { version = view.sheet(Segment::namespaces, 0, kNamespaceBytes, records); }))
        return nullptr;
    return to_pair(version, records);
}

PyObject* reader_beat(PyObject* self, PyObject*) {
    u32 version = 0;
    std::string record;
    if (!reading(self, [&](const RegionView& view) { version = view.sheet(Segment::beat, 0, kBeatBytes, record); })) return nullptr;
    return to_bytes(record.data(), version ? record.size() : 0);
}

PyObject* reader_nodes(PyObject* self, PyObject*) {
    std::vector<u32> ids;
    if (!reading(self, [&](const RegionView& view) { ids = view.nodes(); })) return nullptr;
    return to_bytes(ids);
}

PyObject* reader_stats(PyObject* self, PyObject*) {
    Stats stats{};
    if (!reading(self, [&](const RegionView& view) { stats = view.stats(); })) return nullptr;
    return to_stats(self, stats);
}

PyObject* reader_close(PyObject* self, PyObject*) {
    View view;
    view.swap(view_of(self));
    if (!without_gil([&] { view.reset(); })) return nullptr;
    Py_RETURN_NONE;
}

PyObject* reader_stale(PyObject* self, void*) {
    bool stale = true;
    if (!reading(self, [&](const RegionView& view) { stale = view.stale(); })) return nullptr;
    return PyBool_FromLong(stale);
}

PyObject* reader_generation(PyObject* self, void*) {
    u64 value = 0;
    if (!reading(self, [&](const RegionView& view) { value = view.generation(); })) return nullptr;
    return PyLong_FromUnsignedLongLong(value);
}

PyObject* reader_writer_pid(PyObject* self, void*) {
    u64 value = 0;
    if (!reading(self, [&](const RegionView& view) { value = view.writer_pid(); })) return nullptr;
    return PyLong_FromUnsignedLongLong(value);
}

PyMethodDef methods[] = {
    {"lookup", with_keywords(reader_lookup), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"node", reader_node, METH_O, nullptr},
    {"nodes", reader_nodes, METH_NOARGS, nullptr},
    {"namespaces", reader_namespaces, METH_NOARGS, nullptr},
    {"beat", reader_beat, METH_NOARGS, nullptr},
    {"stats", reader_stats, METH_NOARGS, nullptr},
    {"close", reader_close, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"stale", reader_stale, nullptr, nullptr, nullptr},
    {"generation", reader_generation, nullptr, nullptr, nullptr},
    {"writer_pid", reader_writer_pid, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("Reader of a region; the contract is kvdir.index.BlockReader.")},
    {Py_tp_new, reinterpret_cast<void*>(reader_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(reader_dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, nullptr},
};

}  // namespace

PyType_Spec region_reader_spec = {"kvdir.index._native.RegionReader", sizeof(ReaderObject), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace kvdir::python
