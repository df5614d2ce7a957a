// Python module kvdir.hashing._native: thin binding against the limited API of CPython 3.11. Checks every range before the core sees it.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <new>

#include "chain.hpp"
#include "sha256.hpp"

namespace kvdir::hashing {

namespace {

// Below this many tokens the work takes less than giving up the GIL and getting it back may cost.
constexpr u64 kBrief = 4096;
constexpr u64 kMostBlockTokens = u64{1} << 20;

// A contiguous buffer, exported for as long as this lives. None is an absent one.
class Buffer {
public:
    Buffer() = default;
    ~Buffer() {
        if (view_.obj) PyBuffer_Release(&view_);
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    bool open(PyObject* object) { return object == Py_None || PyObject_GetBuffer(object, &view_, PyBUF_SIMPLE) == 0; }
    const u8* data() const { return static_cast<const u8*>(view_.buf); }
    u64 bytes() const { return static_cast<u64>(view_.len); }
    bool present() const { return view_.obj != nullptr; }

private:
    Py_buffer view_{};
};

bool refuse(const char* why) {
    PyErr_SetString(PyExc_ValueError, why);
    return false;
}

bool aligned(const Buffer& buffer, u64 to) { return reinterpret_cast<std::uintptr_t>(buffer.data()) % to == 0; }

bool check_root(Chain chain, const Buffer& root) {
    const bool may_lack = chain == Chain::sha256_raw || chain == Chain::xxh3_seeded;
    if (!root.present()) return may_lack || refuse("this chain begins with a root");
    return root.bytes() == width_of(chain) || refuse("root must be one hash of this chain");
}

bool check_extras(const Buffer& extras, const Buffer& ends, u64 count) {
    if (extras.present() != ends.present()) return refuse("extras and extra_ends go together");
    if (!extras.present()) return true;
    if (ends.bytes() != count * sizeof(u64) || !aligned(ends, sizeof(u64))) return refuse("extra_ends must be one u64 for each block");
    const u64* end = reinterpret_cast<const u64*>(ends.data());
    u64 before = 0;
    for (u64 block = 0; block < count; before = end[block++]) {
        if (end[block] < before || end[block] > extras.bytes()) return refuse("extra_ends must rise within extras");
    }
    return true;
}

// PyArg_ParseTupleAndKeywords knows no const names.
char** keywords(const char* const* names) { return const_cast<char**>(names); }

PyObject* py_hash_blocks(PyObject*, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"chain", "tokens", "block_tokens", "root", "extras", "extra_ends", "seed", nullptr};
    unsigned chain_number = 0;
    unsigned long long block_tokens = 0, seed = 0;
    PyObject *tokens_object = nullptr, *root_object = Py_None, *extras_object = Py_None, *ends_object = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "IOK|$OOOK", keywords(names), &chain_number, &tokens_object, &block_tokens,
                                     &root_object, &extras_object, &ends_object, &seed)) {
        return nullptr;
    }
    if (chain_number >= kChains) return refuse("unknown chain"), nullptr;
    if (block_tokens == 0 || block_tokens > kMostBlockTokens) return refuse("block_tokens must be between 1 and 2**20"), nullptr;
    const Chain chain = static_cast<Chain>(chain_number);
    Buffer tokens, root, extras, ends;
    if (!tokens.open(tokens_object) || !root.open(root_object) || !extras.open(extras_object) || !ends.open(ends_object)) return nullptr;
    const u64 block_bytes = block_tokens * sizeof(u32);
    if (!tokens.present() || tokens.bytes() % block_bytes || !aligned(tokens, sizeof(u32))) {
        return refuse("tokens must be whole blocks of u32"), nullptr;
    }
    const u64 count = tokens.bytes() / block_bytes;
    if (!check_root(chain, root) || !check_extras(extras, ends, count)) return nullptr;
    if (extras.present() && (chain == Chain::sha256_raw || chain == Chain::xxh3_seeded)) {
        return refuse("this chain has no extra keys"), nullptr;
    }
    PyObject* out = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * width_of(chain)));
    if (!out) return nullptr;
    const Blocks blocks{reinterpret_cast<const u32*>(tokens.data()), count, block_tokens, root.present() ? root.data() : nullptr,
                        extras.present() ? extras.data() : nullptr, reinterpret_cast<const u64*>(ends.data()), seed};
    u8* into = reinterpret_cast<u8*>(PyBytes_AsString(out));
    Outcome outcome = Outcome::done;
    bool no_memory = false;
    PyThreadState* thread = count * block_tokens > kBrief ? PyEval_SaveThread() : nullptr;
    try {
        outcome = hash_blocks(chain, blocks, into);
    } catch (const std::bad_alloc&) {
        no_memory = true;
    }
    if (thread) PyEval_RestoreThread(thread);
    if (!no_memory && outcome == Outcome::done) return out;
    Py_DECREF(out);
    if (no_memory) return PyErr_NoMemory();
    refuse("a block is too long for a hash over pickle: at most 64 KiB of message; choose a scheme over CBOR");
    return nullptr;
}

PyObject* py_xxh3_128(PyObject*, PyObject* data_object) {
    Buffer data;
    if (!data.open(data_object)) return nullptr;
    u8 out[16];
    xxh3_128(data.data(), data.bytes(), out);
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(out), sizeof out);
}

PyObject* py_xxh3_64(PyObject*, PyObject* args) {
    PyObject* data_object = nullptr;
    unsigned long long seed = 0;
    if (!PyArg_ParseTuple(args, "OK", &data_object, &seed)) return nullptr;
    Buffer data;
    if (!data.open(data_object)) return nullptr;
    return PyLong_FromUnsignedLongLong(xxh3_64(data.data(), data.bytes(), seed));
}

PyObject* py_fnv1a_64(PyObject*, PyObject* data_object) {
    Buffer data;
    if (!data.open(data_object)) return nullptr;
    return PyLong_FromUnsignedLongLong(fnv1a_64(data.data(), data.bytes()));
}

PyObject* py_sha256_is_accelerated(PyObject*, PyObject*) { return PyBool_FromLong(sha256_is_accelerated()); }

PyCFunction with_keywords(PyObject* (*function)(PyObject*, PyObject*, PyObject*)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"hash_blocks", with_keywords(py_hash_blocks), METH_VARARGS | METH_KEYWORDS, "Hashes of whole blocks, end to end."},
    {"xxh3_128", py_xxh3_128, METH_O, "XXH3-128 of a buffer, canonical."},
    {"xxh3_64", py_xxh3_64, METH_VARARGS, "XXH3-64 of a buffer with a seed."},
    {"fnv1a_64", py_fnv1a_64, METH_O, "FNV-1a of a buffer, 64 bits."},
    {"sha256_is_accelerated", py_sha256_is_accelerated, METH_NOARGS, "Whether SHA-256 is made by the CPU's SHA instructions."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef_Slot slots[] = {{0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "kvdir.hashing._native", "Native block hash chains; see kvdir.hashing.", 0, methods, slots, nullptr, nullptr, nullptr,
};

}  // namespace

}  // namespace kvdir::hashing

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&kvdir::hashing::definition); }
