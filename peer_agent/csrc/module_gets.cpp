// peer_agent._native: plan and verification of one-sided gets. Signatures and contracts: peer_agent/_native.pyi.
#include "binding.hpp"
#include "gets.hpp"

namespace kvdir::binding {
namespace {

PyObject* py_plan_gets(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"region", "records", "destinations", "source_bytes", nullptr};
    Buffer region, records, destinations;
    unsigned long long source_bytes = 0;
    if (!parse(args, kwargs, "w*y*y*K:plan_gets", names, &region.view, &records.view, &destinations.view, &source_bytes)) return nullptr;
    return guarded(PyExc_RuntimeError, [&]() -> PyObject* {
        const auto wanted = unpack<Record>(records, "records");
        const auto to = unpack<uint64_t>(destinations, "destinations");
        require_count(to.size(), wanted.size(), "destinations");
        const Gets gets = plan_gets(region.region(), wanted.data(), to.data(), wanted.size(), source_bytes);
        return Py_BuildValue("(NNNNN)", bytes_from(gets.statuses), bytes_from(gets.slots), bytes_from(gets.remote),
                             bytes_from(gets.local), bytes_from(gets.lengths));
    });
}

PyObject* py_verify_gets(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"region", "records", "namespace_digest", "fingerprints", "width",
                                        "destinations", "headers", "statuses", nullptr};
    Buffer region, records, digest, fingerprints, destinations, headers, statuses;
    unsigned int width = 0;
    if (!parse(args, kwargs, "w*y*y*y*Iy*y*y*:verify_gets", names, &region.view, &records.view, &digest.view, &fingerprints.view,
               &width, &destinations.view, &headers.view, &statuses.view))
        return nullptr;
    return guarded(PyExc_RuntimeError, [&]() -> PyObject* {
        const auto wanted = unpack<Record>(records, "records");
        const Blocks blocks = blocks_of(digest, fingerprints, width, wanted.size());
        const auto to = unpack<uint64_t>(destinations, "destinations");
        const auto found = unpack<SlotHeader>(headers, "headers");
        auto verdicts = unpack<uint8_t>(statuses, "statuses");
        require_count(to.size(), wanted.size(), "destinations");
        require_count(verdicts.size(), wanted.size(), "statuses");
        const Region arena = region.region();
        destinations_in(arena, to.data(), wanted.data(), wanted.size());
        size_t pending = 0;
        for (size_t i = 0; i < verdicts.size(); ++i) {
            if (verdicts[i] != kPending) continue;
            ++pending;
            arena.require(to[i], wanted[i].length);
        }
        require_count(found.size(), pending, "headers of pending blocks");
        {
            const Unlocked unlocked;
            verify_gets(arena, wanted.data(), blocks, to.data(), found.data(), verdicts.data());
        }
        return bytes_from(verdicts);
    });
}

PyMethodDef functions[] = {
    {"plan_gets", method(py_plan_gets), METH_VARARGS | METH_KEYWORDS, "What one-sided reads of these blocks have to get."},
    {"verify_gets", method(py_verify_gets), METH_VARARGS | METH_KEYWORDS, "Statuses of what one-sided gets brought."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int add_gets_functions(PyObject* module) { return PyModule_AddFunctions(module, functions); }

}  // namespace kvdir::binding
