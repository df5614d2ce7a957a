// peer_agent._native: Python face of the movers. Signatures and contracts: peer_agent/_native.pyi.
// Rule: parse and copy the small packed arguments with the GIL, move bytes without it, hold every buffer until the end.
#include "binding.hpp"
#include "hash.hpp"
#include "raw_stream.hpp"

namespace kvdir::binding {

void require_count(size_t found, size_t wanted, const char* what) {
    if (found != wanted)
        throw std::invalid_argument(std::to_string(found) + " " + what + " for " + std::to_string(wanted) + " records");
}

Blocks blocks_of(const Buffer& namespace_digest, const Buffer& fingerprints, unsigned int width, size_t count) {
    if (width != 8 && width != 16 && width != 32)
        throw std::invalid_argument("fingerprint width is " + std::to_string(width) + "; 8, 16 or 32 are possible");
    if (namespace_digest.bytes() != kDigestBytes)
        throw std::invalid_argument("namespace digest has " + std::to_string(namespace_digest.bytes()) + " bytes instead of 32");
    if (fingerprints.bytes() != count * width)
        throw std::invalid_argument(std::to_string(fingerprints.bytes()) + " bytes of fingerprints for " + std::to_string(count) +
                                    " blocks of width " + std::to_string(width));
    return {count, namespace_digest.data(), fingerprints.data(), width};
}

void SlotRead::unpack_records() {
    if (wanted.empty()) wanted = unpack<Record>(records, "records");
}

uint64_t SlotRead::asked_bytes() {
    unpack_records();
    return payload_bytes(wanted.data(), wanted.size(), nullptr);
}

void SlotRead::prepare() {
    unpack_records();
    blocks = blocks_of(digest, fingerprints, width, wanted.size());
    const auto at = unpack<uint64_t>(destinations, "destinations");
    require_count(at.size(), wanted.size(), "destinations");
    if (deadline_ns == 0) throw std::invalid_argument("deadline_ns is 0; every read has a deadline");
    to = destinations_in(region.region(), at.data(), wanted.data(), wanted.size());
}

PyObject* allocate(PyTypeObject* type) {
    const auto alloc = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    return alloc(type, 0);
}

void free_object(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    const auto release = reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free));
    release(self);
    Py_DECREF(type);
}

int add_type(PyObject* module, const char* name, PyType_Spec* spec, PyObject** type) {
    PyObject* made = PyType_FromModuleAndSpec(module, spec, nullptr);
    if (made == nullptr) return -1;
    const int rc = PyModule_AddObjectRef(module, name, made);
    if (rc == 0 && type != nullptr) *type = Py_NewRef(made);
    Py_DECREF(made);
    return rc;
}

namespace {

PyObject* py_xxh3_64(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"data", nullptr};
    Buffer data;
    if (!parse(args, kwargs, "y*:xxh3_64", names, &data.view)) return nullptr;
    uint64_t value = 0;
    {
        const Unlocked unlocked;
        value = hash64(data.data(), data.bytes());
    }
    return PyLong_FromUnsignedLongLong(value);
}

PyObject* py_add_class(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"region", "size_class", nullptr};
    Buffer region, added;
    if (!parse(args, kwargs, "w*y*:add_class", names, &region.view, &added.view)) return nullptr;
    return guarded(PyExc_RuntimeError, [&] {
        const auto classes = unpack<SizeClass>(added, "size_class");
        if (classes.size() != 1) throw std::invalid_argument("add_class takes one size class");
        add_class(region.region(), classes[0]);
        return Py_NewRef(Py_None);
    });
}

PyObject* py_begin_write(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"region", "offsets", nullptr};
    Buffer region, offsets;
    if (!parse(args, kwargs, "w*y*:begin_write", names, &region.view, &offsets.view)) return nullptr;
    return guarded(PyExc_RuntimeError, [&] {
        const auto at = unpack<uint64_t>(offsets, "offsets");
        std::vector<uint64_t> generations(at.size());
        begin_write(region.region(), at.data(), at.size(), generations.data());
        return bytes_from(generations);
    });
}

PyObject* py_commit(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"region", "offsets", "namespace_digest", "fingerprints", "width", "length", "checksums", nullptr};
    Buffer region, offsets, digest, fingerprints, sums;
    PyObject* checksums = nullptr;
    unsigned int width = 0, length = 0;
    if (!parse(args, kwargs, "w*y*y*y*IIO:commit", names, &region.view, &offsets.view, &digest.view, &fingerprints.view, &width,
               &length, &checksums))
        return nullptr;
    if (checksums != Py_None && PyObject_GetBuffer(checksums, &sums.view, PyBUF_SIMPLE) != 0) return nullptr;
    return guarded(PyExc_RuntimeError, [&]() -> PyObject* {
        const auto at = unpack<uint64_t>(offsets, "offsets");
        const Blocks blocks = blocks_of(digest, fingerprints, width, at.size());
        const auto given = unpack<uint64_t>(sums, "checksums");
        if (checksums != Py_None && given.size() != at.size())
            throw std::invalid_argument(std::to_string(given.size()) + " checksums for " + std::to_string(at.size()) + " slots");
        std::vector<Record> out(at.size());
        {
            const Unlocked unlocked;
            commit(region.region(), at.data(), blocks, length, checksums == Py_None ? nullptr : given.data(), out.data());
        }
        return bytes_from(out);
    });
}

PyObject* py_retire(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"region", "offsets", nullptr};
    Buffer region, offsets;
    if (!parse(args, kwargs, "w*y*:retire", names, &region.view, &offsets.view)) return nullptr;
    return guarded(PyExc_RuntimeError, [&] {
        const auto at = unpack<uint64_t>(offsets, "offsets");
        retire(region.region(), at.data(), at.size());
        return Py_NewRef(Py_None);
    });
}

PyObject* py_records(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"region", "offsets", nullptr};
    Buffer region, offsets;
    if (!parse(args, kwargs, "y*y*:records", names, &region.view, &offsets.view)) return nullptr;
    return guarded(PyExc_RuntimeError, [&] {
        const auto at = unpack<uint64_t>(offsets, "offsets");
        std::vector<Record> out(at.size());
        read_records(region.region(), at.data(), at.size(), out.data());
        return bytes_from(out);
    });
}

PyObject* py_headers(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"region", "offsets", nullptr};
    Buffer region, offsets;
    if (!parse(args, kwargs, "y*y*:headers", names, &region.view, &offsets.view)) return nullptr;
    return guarded(PyExc_RuntimeError, [&] {
        const auto at = unpack<uint64_t>(offsets, "offsets");
        std::vector<SlotHeader> out(at.size());
        read_headers(region.region(), at.data(), at.size(), out.data());
        return bytes_from(out);
    });
}

PyObject* py_write_blocks(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"region", "offsets", "sources", "length", nullptr};
    Buffer region, offsets, sources;
    unsigned int length = 0;
    if (!parse(args, kwargs, "w*y*y*I:write_blocks", names, &region.view, &offsets.view, &sources.view, &length)) return nullptr;
    return guarded(PyExc_RuntimeError, [&]() -> PyObject* {
        const auto at = unpack<uint64_t>(offsets, "offsets");
        const auto from = unpack<uint64_t>(sources, "sources");
        if (from.size() != at.size())
            throw std::invalid_argument(std::to_string(from.size()) + " sources for " + std::to_string(at.size()) + " slots");
        std::vector<uint64_t> checksums(at.size());
        {
            const Unlocked unlocked;
            write_blocks(region.region(), at.data(), from.data(), at.size(), length, checksums.data());
        }
        return bytes_from(checksums);
    });
}

PyObject* py_read_blocks(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"region", "records", "namespace_digest", "fingerprints", "width", "destinations", "check", nullptr};
    Buffer region, records, digest, fingerprints, destinations;
    unsigned int width = 0;
    int check = 0;
    if (!parse(args, kwargs, "y*y*y*y*Iy*p:read_blocks", names, &region.view, &records.view, &digest.view, &fingerprints.view,
               &width, &destinations.view, &check))
        return nullptr;
    return guarded(PyExc_RuntimeError, [&]() -> PyObject* {
        const auto wanted = unpack<Record>(records, "records");
        const Blocks blocks = blocks_of(digest, fingerprints, width, wanted.size());
        const auto to = unpack<uint8_t*>(destinations, "destinations");
        require_count(to.size(), wanted.size(), "destinations");
        std::vector<uint8_t> statuses(wanted.size());
        {
            const Unlocked unlocked;
            read_blocks({region.data(), region.bytes()}, wanted.data(), blocks, to.data(), check != 0, 0, nullptr,
                        statuses.data());
        }
        return bytes_from(statuses);
    });
}

PyObject* py_read_slots(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"source", "records", "namespace_digest", "fingerprints", "width",
                                        "region", "destinations", "check", "deadline_ns", "most_bytes", nullptr};
    Buffer source;
    SlotRead read;
    long long most_bytes = 0;
    if (!parse(args, kwargs, "y*y*y*y*Iw*y*pKL:read_slots", names, &source.view, &read.records.view, &read.digest.view,
               &read.fingerprints.view, &read.width, &read.region.view, &read.destinations.view, &read.check, &read.deadline_ns,
               &most_bytes))
        return nullptr;
    return guarded(PyExc_RuntimeError, [&]() -> PyObject* {
        const unsigned long long asked = read.asked_bytes();
        if (most_bytes < 0 || asked > static_cast<unsigned long long>(most_bytes)) return Py_NewRef(Py_None);
        read.prepare();
        std::vector<uint8_t> statuses(read.wanted.size());
        {
            const Unlocked unlocked;
            read_blocks({source.data(), source.bytes()}, read.wanted.data(), read.blocks, read.to.data(), read.check != 0,
                        read.deadline_ns, nullptr, statuses.data());
        }
        const unsigned long long moved = payload_bytes(read.wanted.data(), statuses.size(), statuses.data());
        return Py_BuildValue("(NKK)", bytes_from(statuses), moved, asked);
    });
}

PyObject* py_ok_bytes(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"records", "statuses", nullptr};
    Buffer records, statuses;
    if (!parse(args, kwargs, "y*y*:ok_bytes", names, &records.view, &statuses.view)) return nullptr;
    return guarded(PyExc_RuntimeError, [&] {
        const auto all = unpack<Record>(records, "records");
        require_count(statuses.bytes(), all.size(), "statuses");
        return PyLong_FromUnsignedLongLong(payload_bytes(all.data(), all.size(), statuses.data()));
    });
}

PyObject* py_copy_scattered(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"region", "offsets", "length", "destination", nullptr};
    Buffer region, offsets, destination;
    unsigned int length = 0;
    if (!parse(args, kwargs, "y*y*Iw*:copy_scattered", names, &region.view, &offsets.view, &length, &destination.view)) return nullptr;
    return guarded(PyExc_RuntimeError, [&]() -> PyObject* {
        const auto at = unpack<uint64_t>(offsets, "offsets");
        if (destination.bytes() < at.size() * length)
            throw std::invalid_argument("destination holds " + std::to_string(destination.bytes()) + " bytes, " +
                                        std::to_string(at.size() * length) + " are needed");
        {
            const Unlocked unlocked;
            copy_scattered(region.region(), at.data(), at.size(), length, destination.writable());
        }
        return Py_NewRef(Py_None);
    });
}

PyObject* py_stream_send(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"fd", "data", "deadline_ns", nullptr};
    int fd = -1;
    Buffer data;
    unsigned long long deadline_ns = 0;
    if (!parse(args, kwargs, "iy*K:stream_send", names, &fd, &data.view, &deadline_ns)) return nullptr;
    return guarded(PyExc_ConnectionError, [&]() -> PyObject* {
        {
            const Unlocked unlocked;
            stream_send(fd, data.data(), data.bytes(), deadline_ns);
        }
        return Py_NewRef(Py_None);
    });
}

PyObject* py_stream_receive(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"fd", "into", "deadline_ns", nullptr};
    int fd = -1;
    Buffer into;
    unsigned long long deadline_ns = 0;
    if (!parse(args, kwargs, "iw*K:stream_receive", names, &fd, &into.view, &deadline_ns)) return nullptr;
    return guarded(PyExc_ConnectionError, [&]() -> PyObject* {
        {
            const Unlocked unlocked;
            stream_receive(fd, into.writable(), into.bytes(), deadline_ns);
        }
        return Py_NewRef(Py_None);
    });
}

PyMethodDef functions[] = {
    {"xxh3_64", method(py_xxh3_64), METH_VARARGS | METH_KEYWORDS, "XXH3-64 of a buffer, seed 0."},
    {"add_class", method(py_add_class), METH_VARARGS | METH_KEYWORDS, "Adds a size class to an arena that others have mapped."},
    {"begin_write", method(py_begin_write), METH_VARARGS | METH_KEYWORDS, "Makes slots invisible before their bytes may change."},
    {"commit", method(py_commit), METH_VARARGS | METH_KEYWORDS, "Writes headers and makes slots visible; returns records."},
    {"retire", method(py_retire), METH_VARARGS | METH_KEYWORDS, "Makes slots invisible and clears their headers."},
    {"records", method(py_records), METH_VARARGS | METH_KEYWORDS, "Records of what the headers say now."},
    {"headers", method(py_headers), METH_VARARGS | METH_KEYWORDS, "Slot headers as found."},
    {"write_blocks", method(py_write_blocks), METH_VARARGS | METH_KEYWORDS, "Scattered copy into reserved slots; returns checksums."},
    {"read_blocks", method(py_read_blocks), METH_VARARGS | METH_KEYWORDS, "Verified scattered copy to addresses."},
    {"read_slots", method(py_read_slots), METH_VARARGS | METH_KEYWORDS, "Verified scattered copy from a peer's region into our slots."},
    {"ok_bytes", method(py_ok_bytes), METH_VARARGS | METH_KEYWORDS, "Payload bytes of the present records whose status is OK."},
    {"copy_scattered", method(py_copy_scattered), METH_VARARGS | METH_KEYWORDS, "Plain scattered memcpy, the yardstick."},
    {"stream_send", method(py_stream_send), METH_VARARGS | METH_KEYWORDS, "Raw TCP stream out, the yardstick."},
    {"stream_receive", method(py_stream_receive), METH_VARARGS | METH_KEYWORDS, "Raw TCP stream in, the yardstick."},
    {nullptr, nullptr, 0, nullptr},
};

int exec(PyObject* module) {
    if (PyModule_AddIntConstant(module, "HEADER_BYTES", static_cast<long>(kHeaderBytes)) != 0) return -1;
    if (add_gets_functions(module) != 0 || add_device_functions(module) != 0) return -1;
    return add_tcp_types(module) != 0 || add_tls_type(module) != 0 || add_mapping_type(module) != 0 ? -1 : add_movers_type(module);
}

PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(exec)}, {0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "Native movers of the data planes.", 0, functions, slots, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace kvdir::binding

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&kvdir::binding::definition); }
