// peer_agent._native.Movers. Contract: peer_agent/_native.pyi.
#include <memory>

#include "binding.hpp"
#include "movers.hpp"
#include "tcp_reading.hpp"

namespace kvdir::binding {
namespace {

// A read on its way: arguments and result. Created and destroyed with the GIL, run without.
class ReadOnItsWay : public Job {
  public:
    SlotRead read;
    std::vector<uint8_t> statuses;

    void prepare() {
        read.prepare();
        statuses.assign(read.wanted.size(), PEER_LOST);
    }
    virtual void begin() {}
};

class ShmRead final : public ReadOnItsWay {
  public:
    Buffer source;

    void run() noexcept override {
        try {
            read_blocks({source.data(), source.bytes()}, read.wanted.data(), read.blocks, read.to.data(), read.check != 0,
                        read.deadline_ns, &stop_, statuses.data());
        } catch (const std::exception&) {  // out of memory: blocks without a verdict stay PEER_LOST
        }
    }
    void abort() noexcept override { stop_.store(true, std::memory_order_relaxed); }

  private:
    std::atomic<bool> stop_{false};
};

class TcpRead final : public ReadOnItsWay {
  public:
    PyObject* connection = nullptr;  // a reference of ours
    unsigned long long lock = 0, epoch = 0;

    ~TcpRead() override {
        reading_.reset();
        Py_XDECREF(connection);
    }
    // In the event loop: the request is sent now, so that the owner is at work while a mover thread wakes up.
    void begin() override { reading_ = client_of(connection).try_begin(job(), statuses.data()); }
    void run() noexcept override {
        try {
            if (reading_ != nullptr) {
                finish();
                reading_.reset();
            } else {
                client_of(connection).read(job(), statuses.data());
            }
        } catch (const std::exception&) {
        }
    }
    void abort() noexcept override { client_of(connection).close(); }

  private:
    ReadJob job() const {
        return {lock, epoch, read.wanted.data(), read.blocks, read.to.data(), read.check != 0, read.deadline_ns};
    }

    void finish() {
        for (Need need = reading_->advance(); need != Need::NOTHING; need = reading_->advance())
            if (!wait_for(client_of(connection).fd(), need, read.deadline_ns)) return reading_->end(LATE);
    }

    std::unique_ptr<TcpReading> reading_;
};

struct MoversObject {
    PyObject_HEAD
    Movers* movers;
    PyObject* connection_type;
};

Movers& movers_of(PyObject* self) { return *reinterpret_cast<MoversObject*>(self)->movers; }

PyObject* movers_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"threads", nullptr};
    Py_ssize_t threads = 0;
    if (!parse(args, kwargs, "n:Movers", names, &threads)) return nullptr;
    return guarded(PyExc_OSError, [&]() -> PyObject* {
        if (threads < 1 || threads > 1024) throw std::invalid_argument(std::to_string(threads) + " threads; 1 to 1024 are possible");
        auto movers = std::make_unique<Movers>(static_cast<size_t>(threads));
        PyObject* module = PyType_GetModule(type);
        PyObject* connection_type = module == nullptr ? nullptr : PyObject_GetAttrString(module, "TcpConnection");
        if (connection_type == nullptr) return nullptr;
        auto* self = reinterpret_cast<MoversObject*>(allocate(type));
        if (self == nullptr) {
            Py_DECREF(connection_type);
            return nullptr;
        }
        self->movers = movers.release();
        self->connection_type = connection_type;
        return reinterpret_cast<PyObject*>(self);
    });
}

void stop(PyObject* self) {
    const Unlocked unlocked;  // joins threads, which end soon but not at once
    movers_of(self).close();
}

void movers_dealloc(PyObject* object) {
    auto* self = reinterpret_cast<MoversObject*>(object);
    stop(object);
    delete self->movers;
    Py_XDECREF(self->connection_type);
    free_object(object);
}

PyObject* submit(PyObject* self, std::unique_ptr<ReadOnItsWay> job) {
    return guarded(PyExc_RuntimeError, [&] {
        job->prepare();
        job->begin();
        return PyLong_FromUnsignedLongLong(movers_of(self).submit(std::move(job)));
    });
}

PyObject* movers_read_slots(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"source", "records", "namespace_digest", "fingerprints", "width",
                                        "region", "destinations", "check", "deadline_ns", nullptr};
    auto job = std::make_unique<ShmRead>();
    SlotRead& read = job->read;
    if (!parse(args, kwargs, "y*y*y*y*Iw*y*pK:read_slots", names, &job->source.view, &read.records.view, &read.digest.view,
               &read.fingerprints.view, &read.width, &read.region.view, &read.destinations.view, &read.check, &read.deadline_ns))
        return nullptr;
    return submit(self, std::move(job));
}

PyObject* movers_read_tcp(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"connection", "lock", "epoch", "records", "namespace_digest", "fingerprints", "width",
                                        "region", "destinations", "check", "deadline_ns", nullptr};
    auto job = std::make_unique<TcpRead>();
    SlotRead& read = job->read;
    PyObject* connection = nullptr;
    if (!parse(args, kwargs, "O!KKy*y*y*Iw*y*pK:read_tcp", names, reinterpret_cast<MoversObject*>(self)->connection_type,
               &connection, &job->lock, &job->epoch, &read.records.view, &read.digest.view, &read.fingerprints.view, &read.width,
               &read.region.view, &read.destinations.view, &read.check, &read.deadline_ns))
        return nullptr;
    job->connection = Py_NewRef(connection);
    return submit(self, std::move(job));
}

PyObject* movers_abort(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"ticket", nullptr};
    unsigned long long ticket = 0;
    if (!parse(args, kwargs, "K:abort", names, &ticket)) return nullptr;
    movers_of(self).abort(ticket);
    Py_RETURN_NONE;
}

PyObject* movers_collect(PyObject* self, PyObject*) {
    const std::vector<std::unique_ptr<Job>> jobs = movers_of(self).collect();
    PyObject* list = PyList_New(0);
    for (const auto& job : jobs) {
        if (list == nullptr) return nullptr;
        PyObject* pair = Py_BuildValue("(KN)", static_cast<unsigned long long>(job->ticket),
                                       bytes_from(static_cast<const ReadOnItsWay&>(*job).statuses));
        if (pair == nullptr || PyList_Append(list, pair) != 0) Py_CLEAR(list);
        Py_XDECREF(pair);
    }
    return list;
}

PyObject* movers_fileno(PyObject* self, PyObject*) { return PyLong_FromLong(movers_of(self).fd()); }

PyObject* movers_close(PyObject* self, PyObject*) {
    stop(self);
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"read_slots", method(movers_read_slots), METH_VARARGS | METH_KEYWORDS, "Begins an shm read; returns its ticket."},
    {"read_tcp", method(movers_read_tcp), METH_VARARGS | METH_KEYWORDS, "Begins a tcp read; returns its ticket."},
    {"abort", method(movers_abort), METH_VARARGS | METH_KEYWORDS, "Makes a read end soon."},
    {"collect", movers_collect, METH_NOARGS, "Reads that have ended: [(ticket, statuses)]."},
    {"fileno", movers_fileno, METH_NOARGS, "Readable when `collect` has something."},
    {"close", movers_close, METH_NOARGS, "Aborts reads, joins the threads; idempotent."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(movers_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(movers_dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>("Native threads that run reads.")},
    {0, nullptr},
};
PyType_Spec spec = {"peer_agent._native.Movers", sizeof(MoversObject), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

int add_movers_type(PyObject* module) { return add_type(module, "Movers", &spec, nullptr); }

}  // namespace kvdir::binding
