// peer_agent._native: Python face of device.hpp. Signatures and contracts: peer_agent/_native.pyi.
#include "device.hpp"

#include "binding.hpp"

namespace kvdir::binding {
namespace {

PyObject* py_payload_checksums(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"region", "offsets", "length", nullptr};
    Buffer region, offsets;
    unsigned int length = 0;
    if (!parse(args, kwargs, "y*y*I:payload_checksums", names, &region.view, &offsets.view, &length)) return nullptr;
    return guarded(PyExc_RuntimeError, [&]() -> PyObject* {
        const auto at = unpack<uint64_t>(offsets, "offsets");
        std::vector<uint64_t> checksums(at.size());
        {
            const Unlocked unlocked;
            payload_checksums(region.region(), at.data(), at.size(), length, checksums.data());
        }
        return bytes_from(checksums);
    });
}

PyObject* py_reserved_payloads(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"region", "offsets", "length", nullptr};
    Buffer region, offsets;
    unsigned int length = 0;
    if (!parse(args, kwargs, "w*y*I:reserved_payloads", names, &region.view, &offsets.view, &length)) return nullptr;
    return guarded(PyExc_RuntimeError, [&]() -> PyObject* {
        const auto at = unpack<uint64_t>(offsets, "offsets");
        std::vector<uint64_t> addresses(at.size());
        reserved_payloads(region.region(), at.data(), at.size(), length, addresses.data());
        return bytes_from(addresses);
    });
}

PyObject* py_verify_blocks(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"region", "records", "namespace_digest", "fingerprints", "width", "check", nullptr};
    Buffer region, records, digest, fingerprints;
    unsigned int width = 0;
    int check = 0;
    if (!parse(args, kwargs, "y*y*y*y*Ip:verify_blocks", names, &region.view, &records.view, &digest.view, &fingerprints.view,
               &width, &check))
        return nullptr;
    return guarded(PyExc_RuntimeError, [&]() -> PyObject* {
        const auto wanted = unpack<Record>(records, "records");
        const Blocks blocks = blocks_of(digest, fingerprints, width, wanted.size());
        std::vector<uint8_t> statuses(wanted.size());
        {
            const Unlocked unlocked;
            verify_blocks({region.data(), region.bytes()}, wanted.data(), blocks, check != 0, statuses.data());
        }
        return bytes_from(statuses);
    });
}

void require_as_many(size_t destinations, size_t sources, size_t lengths) {
    if (destinations != sources || destinations != lengths)
        throw std::invalid_argument(std::to_string(destinations) + " destinations, " + std::to_string(sources) + " sources and " +
                                    std::to_string(lengths) + " lengths; as many of each");
}

PyObject* py_begin_copies(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"function", "destinations", "sources", "lengths", "stream", nullptr};
    unsigned long long function = 0, stream = 0;
    Buffer destinations, sources, lengths;
    if (!parse(args, kwargs, "Ky*y*y*K:begin_copies", names, &function, &destinations.view, &sources.view, &lengths.view, &stream))
        return nullptr;
    return guarded(PyExc_RuntimeError, [&]() -> PyObject* {
        const auto to = unpack<uint64_t>(destinations, "destinations");
        const auto from = unpack<uint64_t>(sources, "sources");
        const auto bytes = unpack<uint64_t>(lengths, "lengths");
        if (function == 0) throw std::invalid_argument("function is 0; pass the address of the driver's copy function");
        require_as_many(to.size(), from.size(), bytes.size());
        CopyBegun begun{};
        {
            const Unlocked unlocked;
            begun = begin_copies(reinterpret_cast<CopyFunction>(function), to.data(), from.data(), bytes.data(), to.size(),
                                 reinterpret_cast<void*>(stream));
        }
        return Py_BuildValue("in", begun.code, static_cast<Py_ssize_t>(begun.begun));
    });
}

PyObject* py_copy_spans(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"destinations", "sources", "lengths", nullptr};
    Buffer destinations, sources, lengths;
    if (!parse(args, kwargs, "y*y*y*:copy_spans", names, &destinations.view, &sources.view, &lengths.view)) return nullptr;
    return guarded(PyExc_RuntimeError, [&]() -> PyObject* {
        const auto to = unpack<uint64_t>(destinations, "destinations");
        const auto from = unpack<uint64_t>(sources, "sources");
        const auto bytes = unpack<uint64_t>(lengths, "lengths");
        require_as_many(to.size(), from.size(), bytes.size());
        {
            const Unlocked unlocked;
            copy_spans(to.data(), from.data(), bytes.data(), to.size());
        }
        Py_RETURN_NONE;
    });
}

PyMethodDef functions[] = {
    {"payload_checksums", method(py_payload_checksums), METH_VARARGS | METH_KEYWORDS, "XXH3-64 of slots' payloads where they lie."},
    {"reserved_payloads", method(py_reserved_payloads), METH_VARARGS | METH_KEYWORDS, "Addresses of reserved slots' payloads."},
    {"verify_blocks", method(py_verify_blocks), METH_VARARGS | METH_KEYWORDS, "Verifies blocks where they lie."},
    {"begin_copies", method(py_begin_copies), METH_VARARGS | METH_KEYWORDS, "Queues asynchronous copies of a device's driver."},
    {"copy_spans", method(py_copy_spans), METH_VARARGS | METH_KEYWORDS, "Copies host memory to host memory."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int add_device_functions(PyObject* module) { return PyModule_AddFunctions(module, functions); }

}  // namespace kvdir::binding
