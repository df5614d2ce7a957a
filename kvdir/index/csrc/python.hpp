// What the two Python types share: argument checks, owned references, and running without the GIL.
//
// Rule: nobody waits for a core's lock while holding the GIL, and no Python call happens under it; so the two cannot wait for
// each other. Short work keeps the GIL if the lock is free: whoever gives the GIL up for microseconds in a process with busy
// threads gets it back milliseconds later. A buffer stays exported for as long as the core reads it, so its memory cannot move or
// go away; another thread that writes into it meanwhile gets a nonsense batch, not an unsafe one.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <exception>
#include <mutex>
#include <new>
#include <string>

#include "index.hpp"

namespace kvdir::python {

struct ModuleState {
    PyObject* lookup_type;  // kvdir.index.answers.Lookup
    PyObject* stats_type;   // kvdir.index.answers.IndexStats
    PyObject* region_lookup_type;  // kvdir.index.answers.RegionLookup
    PyObject* evicted_type;  // kvdir.index.answers.Evicted
    PyObject* sketch_type;
};

template <class Core>
struct Guarded {
    template <class... Args>
    explicit Guarded(Args&&... args) : core(static_cast<Args&&>(args)...) {}
    Core core;
    std::mutex mutex;
};

template <class Core>
struct Object {
    PyObject_HEAD
    Guarded<Core>* guarded;
};

template <class Core>
Guarded<Core>& guarded(PyObject* self) {
    return *reinterpret_cast<Object<Core>*>(self)->guarded;
}

// An owned reference.
class Ref {
public:
    explicit Ref(PyObject* object = nullptr) : object_(object) {}
    ~Ref() { Py_XDECREF(object_); }
    Ref(const Ref&) = delete;
    Ref& operator=(const Ref&) = delete;
    PyObject* get() const { return object_; }
    PyObject* take() {
        PyObject* object = object_;
        object_ = nullptr;
        return object;
    }
    explicit operator bool() const { return object_ != nullptr; }

private:
    PyObject* object_;
};

// A contiguous buffer, exported for as long as this lives.
class Buffer {
public:
    Buffer() = default;
    ~Buffer() {
        if (held_) PyBuffer_Release(&view_);
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    bool open(PyObject* object, const char* name);  // false with a Python error set
    const u8* data() const { return static_cast<const u8*>(view_.buf); }
    u64 bytes() const { return static_cast<u64>(view_.len); }

private:
    Py_buffer view_{};
    bool held_ = false;
};

// Packed fingerprints and their width, checked.
class FingerprintsArgument {
public:
    bool open(PyObject* fingerprints, PyObject* width);  // false with a Python error set
    const Fingerprints& operator*() const { return value_; }

private:
    Buffer buffer_;
    Fingerprints value_{};
};

// An integer in [least, most]; otherwise ValueError (or TypeError when it is missing or no integer) that names the argument.
bool to_u64(PyObject* object, const char* name, u64 least, u64 most, u64& out);

// The bound of an index in bytes, 0 for none; ValueError for one that nothing fits into.
bool to_bound(PyObject* object, u64& out);

// What open(2) takes, of a str, bytes or PathLike; false with a Python error set.
bool to_path(PyObject* object, std::string& out);

PyObject* to_bytes(const void* data, u64 bytes);

template <class T>
PyObject* to_bytes(const std::vector<T>& values) {
    return to_bytes(values.data(), values.size() * sizeof(T));
}

void raise_region_error(const char* message);  // kvdir.index.RegionError

// Before the lock of a core, which a fork may have found taken for ever: throws when it is another process's.
template <class Core>
void require_ours(const Core&) {}
void require_ours(const Index& index);

// Before work on a core, under its lock: throws when it cannot be used any more.
template <class Core>
void require_usable(const Core&) {}
void require_usable(const Index& index);

enum class Gil { released, kept };

// Runs `work`; false with a Python error set when it threw.
template <class Work>
bool run(Gil gil, Work work) {
    enum { done, no_memory, refused, failed } outcome = done;
    std::string message;
    PyThreadState* thread = gil == Gil::released ? PyEval_SaveThread() : nullptr;
    try {
        work();
    } catch (const std::bad_alloc&) {
        outcome = no_memory;
    } catch (const RegionError& error) {
        outcome = refused;
        message = error.what();
    } catch (...) {
        outcome = failed;
    }
    if (thread) PyEval_RestoreThread(thread);
    if (outcome == no_memory) {
        PyErr_SetString(PyExc_MemoryError, "out of memory, shared memory or address space: raise the limit, or drop holders; what fitted was kept");
    } else if (outcome == refused) {
        raise_region_error(message.c_str());
    } else if (outcome == failed) {
        PyErr_SetString(PyExc_SystemError, "unexpected failure in the native index; please report it");
    }
    return outcome == done;
}

template <class Work>
bool without_gil(Work work) {
    return run(Gil::released, work);
}

template <class Core, class Work>
bool locked(PyObject* self, Work work) {
    Guarded<Core>& held = guarded<Core>(self);
    return without_gil([&] {
        require_ours(held.core);
        std::lock_guard<std::mutex> lock(held.mutex);
        require_usable(held.core);
        work(held.core);
    });
}

// The same for work of microseconds.
template <class Core, class Work>
bool locked_briefly(PyObject* self, Work work) {
    Guarded<Core>& held = guarded<Core>(self);
    if (!held.mutex.try_lock()) return locked<Core>(self, work);
    return run(Gil::kept, [&] {
        std::lock_guard<std::mutex> lock(held.mutex, std::adopt_lock);
        require_ours(held.core);
        require_usable(held.core);
        work(held.core);
    });
}

template <class Core, class... Args>
PyObject* construct(PyTypeObject* type, Args... args) {
    auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    Ref self(allocate(type, 0));
    if (!self) return nullptr;
    auto*& place = reinterpret_cast<Object<Core>*>(self.get())->guarded;
    if (!without_gil([&] { place = new Guarded<Core>(args...); })) return nullptr;
    return self.take();
}

template <class Core>
void dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    delete reinterpret_cast<Object<Core>*>(self)->guarded;
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

inline char** keywords(const char* const* names) { return const_cast<char**>(names); }

inline PyCFunction with_keywords(PyObject* (*function)(PyObject*, PyObject*, PyObject*)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

inline ModuleState& state_of(PyObject* self) { return *static_cast<ModuleState*>(PyType_GetModuleState(Py_TYPE(self))); }

constexpr u64 kAny = ~u64{0};
constexpr u64 kHolders = kHolderLimit - 1;
constexpr u64 kExpected = u64{1} << 31;

PyObject* to_stats(PyObject* self, const Stats& stats);
// A sequence of packed u32 per set, put into a new list or tuple, whose reference is taken over.
PyObject* to_packed_sets(PyObject* container, const SetList& sets, int (*put)(PyObject*, Py_ssize_t, PyObject*));

extern PyMethodDef index_methods[];  // also those of RegionIndex, whose core is an Index, too
extern PyType_Spec index_spec;
extern PyType_Spec region_index_spec;
extern PyType_Spec region_reader_spec;
extern PyType_Spec sketch_spec;
extern PyType_Spec gather_floor_spec;

}  // namespace kvdir::python
