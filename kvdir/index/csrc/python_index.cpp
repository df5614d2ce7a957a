// kvdir.index._native.Index.
#include "python.hpp"

namespace kvdir::python {

namespace {

constexpr u64 kSeconds = ~u32{0};

PyObject* index_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"expected_blocks", "seed", "max_bytes", nullptr};
    PyObject *expected_object = nullptr, *seed_object = nullptr, *max_object = nullptr;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOO:Index", keywords(names), &expected_object, &seed_object, &max_object))
        return nullptr;
    u64 expected = 0, seed = 0, max_bytes = 0;
    if (expected_object && !to_u64(expected_object, "expected_blocks", 0, kExpected, expected)) return nullptr;
    if (seed_object && !to_u64(seed_object, "seed", 0, kAny, seed)) return nullptr;
    if (max_object && !to_bound(max_object, max_bytes)) return nullptr;
    return construct<Index>(type, expected, seed, max_bytes);
}

// The native sketch in `object`; null for None. False with TypeError set for anything else.
bool to_sketch(PyObject* self, PyObject* object, Guarded<Sketch>*& out) {
    out = nullptr;
    if (object == nullptr || object == Py_None) return true;
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) == state_of(self).sketch_type) {
        out = &guarded<Sketch>(object);
        return true;
    }
    PyErr_Format(PyExc_TypeError, "sketch must be a kvdir.index.Sketch or None, not %R",
                 reinterpret_cast<PyObject*>(Py_TYPE(object)));
    return false;
}

// Work on index and sketch under both locks.
template <class Work>
PyObject* change(PyObject* self, Guarded<Sketch>* sketch, Work work) {
    Guarded<Index>& index = guarded<Index>(self);
    u64 changed = 0;
    bool done = without_gil([&] {
        require_ours(index.core);
        if (sketch) {
            std::scoped_lock lock(index.mutex, sketch->mutex);
            require_usable(index.core);
            changed = work(index.core, &sketch->core);
        } else {
            std::lock_guard<std::mutex> lock(index.mutex);
            require_usable(index.core);
            changed = work(index.core, nullptr);
        }
    });
    return done ? PyLong_FromUnsignedLongLong(changed) : nullptr;
}

PyObject* index_store(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"fingerprints", "width", "scope", "holder", "now_s", "sketch", nullptr};
    PyObject *data, *width, *scope_object = nullptr, *holder_object = nullptr, *now_object = nullptr, *sketch_object = nullptr;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$OOOO:store", keywords(names), &data, &width, &scope_object,
                                     &holder_object, &now_object, &sketch_object))
        return nullptr;
    FingerprintsArgument blocks;
    u64 scope, holder, now_s;
    Guarded<Sketch>* sketch;
    if (!blocks.open(data, width) || !to_u64(scope_object, "scope", 0, kAny, scope) ||
        !to_u64(holder_object, "holder", 0, kHolders, holder) || !to_u64(now_object, "now_s", 0, kSeconds, now_s) ||
        !to_sketch(self, sketch_object, sketch))
        return nullptr;
    return change(self, sketch, [&](Index& index, Sketch* with) {
        return index.store(*blocks, scope, static_cast<u32>(holder), static_cast<u32>(now_s), with);
    });
}

PyObject* index_remove(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"fingerprints", "width", "scope", "holder", "sketch", nullptr};
    PyObject *data, *width, *scope_object = nullptr, *holder_object = nullptr, *sketch_object = nullptr;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$OOO:remove", keywords(names), &data, &width, &scope_object,
                                     &holder_object, &sketch_object))
        return nullptr;
    FingerprintsArgument blocks;
    u64 scope, holder;
    Guarded<Sketch>* sketch;
    if (!blocks.open(data, width) || !to_u64(scope_object, "scope", 0, kAny, scope) ||
        !to_u64(holder_object, "holder", 0, kHolders, holder) || !to_sketch(self, sketch_object, sketch))
        return nullptr;
    return change(self, sketch, [&](Index& index, Sketch* with) {
        return index.remove(*blocks, scope, static_cast<u32>(holder), with);
    });
}

PyObject* to_list(const SetList& sets) {
    return to_packed_sets(PyList_New(static_cast<Py_ssize_t>(sets.ends.size())), sets, PyList_SetItem);
}

PyObject* index_lookup(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"fingerprints", "width", "scope", "prefix", "touch_s", nullptr};
    PyObject *data, *width, *scope_object = nullptr, *touch_object = nullptr;
    int prefix = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$OpO:lookup", keywords(names), &data, &width, &scope_object, &prefix,
                                     &touch_object))
        return nullptr;
    FingerprintsArgument blocks;
    u64 scope, touch_s = 0;
    bool touch = touch_object && touch_object != Py_None;
    if (!blocks.open(data, width) || !to_u64(scope_object, "scope", 0, kAny, scope)) return nullptr;
    if (touch && !to_u64(touch_object, "touch_s", 0, kSeconds, touch_s)) return nullptr;
    Answer answer;
    bool done = locked<Index>(self, [&](Index& index) {
        answer = prefix ? index.lookup_prefix(*blocks, scope) : index.lookup_sparse(*blocks, scope);
        if (!touch) return;
        u64 followed = prefix ? answer.hits : (*blocks).count;
        index.touch({(*blocks).data, followed, (*blocks).width}, scope, static_cast<u32>(touch_s));
    });
    if (!done) return nullptr;
    Ref runs(to_bytes(answer.runs));
    Ref sets(to_list(answer.sets));
    if (!runs || !sets) return nullptr;
    return PyObject_CallFunction(state_of(self).lookup_type, "OOK", runs.get(), sets.get(),
                                 static_cast<unsigned long long>(answer.hits));
}

bool to_holder(PyObject* object, u32& out) {
    u64 holder;
    if (!to_u64(object, "holder", 0, kHolders, holder)) return false;
    out = static_cast<u32>(holder);
    return true;
}

PyObject* index_drop(PyObject* self, PyObject* object) {
    u32 holder;
    u64 blocks = 0;
    if (!to_holder(object, holder)) return nullptr;
    if (!locked<Index>(self, [&](Index& index) { blocks = index.drop(holder); })) return nullptr;
    return PyLong_FromUnsignedLongLong(blocks);
}

PyObject* index_holder_blocks(PyObject* self, PyObject* object) {
    u32 holder;
    u64 blocks = 0;
    if (!to_holder(object, holder)) return nullptr;
    if (!locked<Index>(self, [&](Index& index) { blocks = index.holder_blocks(holder); })) return nullptr;
    return PyLong_FromUnsignedLongLong(blocks);
}

// Calls read(index, blocks, scope, out) with one T per block, and gives the result as bytes.
template <class T, class Read>
PyObject* per_block(PyObject* self, PyObject* args, PyObject* kwargs, Read read) {
    static const char* names[] = {"fingerprints", "width", "scope", nullptr};
    PyObject *data, *width, *scope_object = nullptr;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$O", keywords(names), &data, &width, &scope_object)) return nullptr;
    FingerprintsArgument blocks;
    u64 scope;
    if (!blocks.open(data, width) || !to_u64(scope_object, "scope", 0, kAny, scope)) return nullptr;
    Ref out(to_bytes(nullptr, (*blocks).count * sizeof(T)));
    if (!out) return nullptr;
    T* values = reinterpret_cast<T*>(PyBytes_AsString(out.get()));  // nobody else has seen these bytes yet
    if (!locked<Index>(self, [&](Index& index) { read(index, *blocks, scope, values); })) return nullptr;
    return out.take();
}

PyObject* index_last_access(PyObject* self, PyObject* args, PyObject* kwargs) {
    return per_block<u32>(self, args, kwargs, [](Index& index, const Fingerprints& blocks, u64 scope, u32* out) {
        index.last_access(blocks, scope, out);
    });
}

PyObject* index_keys(PyObject* self, PyObject* args, PyObject* kwargs) {
    return per_block<u64>(self, args, kwargs, [](Index& index, const Fingerprints& blocks, u64 scope, u64* out) {
        index.keys(blocks, scope, out);
    });
}

// Packed u64 keys, which the core reads like fingerprints of 8 bytes. False with a Python error set.
bool open_keys(PyObject* object, Buffer& buffer, Fingerprints& out) {
    if (!buffer.open(object, "keys")) return false;
    out = {buffer.data(), buffer.bytes() / sizeof(u64), sizeof(u64)};
    if (buffer.bytes() % sizeof(u64) == 0 && out.count <= ~u32{0}) return true;
    PyErr_Format(PyExc_ValueError, "keys are %llu bytes: pass whole u64, at most 2**32 - 1 of them",
                 static_cast<unsigned long long>(buffer.bytes()));
    return false;
}

PyObject* index_key_access(PyObject* self, PyObject* object) {
    Buffer buffer;
    Fingerprints keys;
    if (!open_keys(object, buffer, keys)) return nullptr;
    Ref out(to_bytes(nullptr, keys.count * sizeof(u32)));
    if (!out) return nullptr;
    u32* values = reinterpret_cast<u32*>(PyBytes_AsString(out.get()));  // nobody else has seen these bytes yet
    if (!locked<Index>(self, [&](Index& index) { index.key_access(keys, values); })) return nullptr;
    return out.take();
}

PyObject* index_restore(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"keys", "access", "holder", nullptr};
    PyObject *keys_object, *access_object, *holder_object = nullptr;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$O:restore", keywords(names), &keys_object, &access_object,
                                     &holder_object))
        return nullptr;
    Buffer keys_buffer, access;
    Fingerprints keys;
    u64 holder, changed = 0;
    if (!open_keys(keys_object, keys_buffer, keys) || !access.open(access_object, "access") ||
        !to_u64(holder_object, "holder", 0, kHolders, holder))
        return nullptr;
    if (access.bytes() != keys.count * sizeof(u32)) {
        PyErr_Format(PyExc_ValueError, "access is %llu bytes for %llu keys: pass one u32 per key",
                     static_cast<unsigned long long>(access.bytes()), static_cast<unsigned long long>(keys.count));
        return nullptr;
    }
    if (!locked<Index>(self, [&](Index& index) { changed = index.restore(keys, access.data(), static_cast<u32>(holder)); }))
        return nullptr;
    return PyLong_FromUnsignedLongLong(changed);
}

PyObject* index_heads(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"keys", "scope", nullptr};
    PyObject *keys_object, *scope_object = nullptr;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$O:heads", keywords(names), &keys_object, &scope_object)) return nullptr;
    Buffer buffer;
    Fingerprints keys;
    u64 scope;
    if (!open_keys(keys_object, buffer, keys) || !to_u64(scope_object, "scope", 0, kAny, scope)) return nullptr;
    Ref out(to_bytes(nullptr, keys.count * sizeof(u64)));
    if (!out) return nullptr;
    u64* values = reinterpret_cast<u64*>(PyBytes_AsString(out.get()));  // nobody else has seen these bytes yet
    if (!locked<Index>(self, [&](Index& index) { index.heads(keys, scope, values); })) return nullptr;
    return out.take();
}

PyObject* index_make_room(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"blocks", "holder", nullptr};
    PyObject *blocks_object, *holder_object = nullptr;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$O:make_room", keywords(names), &blocks_object, &holder_object))
        return nullptr;
    u64 blocks, holder;
    if (!to_u64(blocks_object, "blocks", 0, kExpected, blocks) || !to_u64(holder_object, "holder", 0, kHolders, holder))
        return nullptr;
    Evicted evicted;
    if (!locked<Index>(self, [&](Index& index) { evicted = index.make_room(blocks, static_cast<u32>(holder)); })) return nullptr;
    if (evicted.keys.empty()) Py_RETURN_NONE;
    Ref keys(to_bytes(evicted.keys));
    Ref numbers(to_bytes(evicted.numbers));
    Ref sets(to_list(evicted.sets));
    if (!keys || !numbers || !sets) return nullptr;
    return PyObject_CallFunction(state_of(self).evicted_type, "OOO", keys.get(), numbers.get(), sets.get());
}

PyObject* index_dump(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"cursor", "max_blocks", nullptr};
    PyObject *cursor_object, *max_object;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:dump", keywords(names), &cursor_object, &max_object)) return nullptr;
    u64 cursor, max_blocks;
    if (!to_u64(cursor_object, "cursor", 0, kAny, cursor) || !to_u64(max_object, "max_blocks", 1, kAny, max_blocks)) return nullptr;
    DumpPage page;
    if (!locked<Index>(self, [&](Index& index) { page = index.dump(cursor, max_blocks); })) return nullptr;
    Ref keys(to_bytes(page.keys));
    Ref numbers(to_bytes(page.numbers));
    Ref sets(to_list(page.sets));
    if (!keys || !numbers || !sets) return nullptr;
    return Py_BuildValue("(KOOO)", static_cast<unsigned long long>(page.next), keys.get(), numbers.get(), sets.get());
}

PyObject* index_sweep(PyObject* self, PyObject* object) {
    u64 max_blocks, freed = 0;
    if (!to_u64(object, "max_blocks", 0, kAny, max_blocks)) return nullptr;
    if (!locked<Index>(self, [&](Index& index) { freed = index.sweep(max_blocks); })) return nullptr;
    return PyLong_FromUnsignedLongLong(freed);
}

PyObject* index_stats(PyObject* self, PyObject*) {
    Stats stats{};
    if (!locked<Index>(self, [&](Index& index) { stats = index.stats(); })) return nullptr;
    return to_stats(self, stats);
}

}  // namespace

PyMethodDef index_methods[] = {
    {"store", with_keywords(index_store), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"remove", with_keywords(index_remove), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"lookup", with_keywords(index_lookup), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"drop", index_drop, METH_O, nullptr},
    {"holder_blocks", index_holder_blocks, METH_O, nullptr},
    {"last_access", with_keywords(index_last_access), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"keys", with_keywords(index_keys), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"key_access", index_key_access, METH_O, nullptr},
    {"restore", with_keywords(index_restore), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"heads", with_keywords(index_heads), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"make_room", with_keywords(index_make_room), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"dump", with_keywords(index_dump), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"sweep", index_sweep, METH_O, nullptr},
    {"stats", index_stats, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

namespace {

PyType_Slot index_slots[] = {
    {Py_tp_doc, const_cast<char*>("Native block index; the contract is kvdir.index.BlockIndex.")},
    {Py_tp_new, reinterpret_cast<void*>(index_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<Index>)},
    {Py_tp_methods, index_methods},
    {0, nullptr},
};

}  // namespace

PyType_Spec index_spec = {"kvdir.index._native.Index", sizeof(Object<Index>), 0, Py_TPFLAGS_DEFAULT, index_slots};

}  // namespace kvdir::python
