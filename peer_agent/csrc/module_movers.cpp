// peer_agent._native.Movers. Contract: peer_agent/_native.pyi.
#include <algorithm>
#include <atomic>
#include <memory>

#include "binding.hpp"
#include "movers.hpp"
#include "tcp_reading.hpp"

namespace kvdir::binding {
namespace {

// Python's side of a job. Created, collected and destroyed with the GIL, run without.
class PythonJob : public Job {
  public:
    // What `collect` gives for it: a new reference, null with an exception set.
    virtual PyObject* result() = 0;
    // Before it is submitted; std::invalid_argument and std::runtime_error pass through.
    virtual Need begin() = 0;
};

class SlotReadJob : public PythonJob {
  public:
    SlotRead read;

    PyObject* result() override {
        const unsigned long long moved = payload_bytes(read.wanted.data(), statuses_.size(), statuses_.data());
        return Py_BuildValue("(NK)", bytes_from(statuses_), moved);
    }
    Need begin() override {
        read.prepare();
        deadline_ns = read.deadline_ns;
        bytes = read.asked_bytes();
        statuses_.assign(read.wanted.size(), PEER_LOST);
        return Need::TURN;
    }

  protected:
    std::vector<uint8_t> statuses_;
};

class ShmRead final : public SlotReadJob {
  public:
    Buffer source;

    Need advance() noexcept override {
        const size_t end = turn_end();
        try {
            read_blocks({source.data(), source.bytes()}, read.wanted.data() + next_, read.blocks.part(next_, end),
                        read.to.data() + next_, read.check != 0, read.deadline_ns, &stop_, statuses_.data() + next_);
        } catch (const std::exception&) {  // out of memory: blocks without a verdict stay PEER_LOST
        }
        next_ = end;
        return next_ == statuses_.size() ? Need::NOTHING : Need::TURN;
    }
    void end(Status status) noexcept override { std::fill(statuses_.begin() + static_cast<ptrdiff_t>(next_), statuses_.end(), status); }
    void interrupt() noexcept override { stop_.store(true, std::memory_order_relaxed); }

  private:
    static constexpr size_t kTurnBytes = 8 << 20;

    size_t turn_end() const {
        size_t end = next_, bytes = 0;
        while (end < read.wanted.size() && bytes < kTurnBytes) bytes += read.wanted[end++].length;
        return end;
    }

    size_t next_ = 0;  // first block without a verdict
    std::atomic<bool> stop_{false};
};

class TcpRead final : public SlotReadJob {
  public:
    PyObject* connection = nullptr;  // a reference of ours
    Buffer shown;
    unsigned long long epoch = 0;

    ~TcpRead() override {
        reading_.reset();
        Py_XDECREF(connection);
    }
    // In the event loop: the request is sent now, and the answer wakes a mover thread.
    Need begin() override {
        SlotReadJob::begin();
        if (client_of(connection).computes()) bytes = 0;  // in the threads, however small
        reading_ = client_of(connection).try_read(
            {capability_of(shown), epoch, read.wanted.data(), read.blocks, read.to.data(), read.check != 0, read.deadline_ns},
            statuses_.data());
        if (reading_ == nullptr) throw std::runtime_error("the connection is busy with another read");
        return reading_->begin();
    }
    Need advance() noexcept override {
        try {
            const Need need = reading_->advance();
            if (need == Need::NOTHING) reading_.reset();  // the connection is free
            return need;
        } catch (const std::exception&) {  // out of memory
            end(PEER_LOST);
            return Need::NOTHING;
        }
    }
    void end(Status status) noexcept override {
        reading_->end(status);
        reading_.reset();
    }
    void interrupt() noexcept override { client_of(connection).close(); }
    int fd() const noexcept override { return client_of(connection).fd(); }

  private:
    std::unique_ptr<TcpReading> reading_;
};

// Opens a connection; the result is the TcpConnection, or a str that says why there is none.
class TcpConnect final : public PythonJob {
  public:
    PyObject* connection_type = nullptr;  // of the Movers that collect it
    std::string host;
    uint16_t port = 0;
    MakeStream make;

    Need begin() override {
        client_ = std::make_unique<TcpClient>(host, port, std::move(make));
        return Need::WRITE;
    }
    Need advance() noexcept override {
        try {
            return client_->greet();
        } catch (const std::exception& error) {
            return fail(error.what()), Need::NOTHING;
        }
    }
    void end(Status status) noexcept override { fail(status == LATE ? client_->late_reason() : "closed while connecting"); }
    void interrupt() noexcept override {}  // never runs for long
    int fd() const noexcept override { return client_->fd(); }
    PyObject* result() override {
        if (client_ != nullptr) return new_connection(connection_type, std::move(client_));
        return PyUnicode_FromStringAndSize(reason_.data(), static_cast<Py_ssize_t>(reason_.size()));
    }

  private:
    void fail(std::string reason) {
        reason_ = std::move(reason);
        client_.reset();
    }

    std::unique_ptr<TcpClient> client_;
    std::string reason_;
};

struct MoversObject {
    PyObject_HEAD
    Movers* movers;
    PyObject* connection_type;
};

Movers& movers_of(PyObject* self) { return *reinterpret_cast<MoversObject*>(self)->movers; }

PyObject* movers_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"threads", "loop_bytes", nullptr};
    Py_ssize_t threads = 0;
    unsigned long long loop_bytes = 0;
    if (!parse(args, kwargs, "nK:Movers", names, &threads, &loop_bytes)) return nullptr;
    return guarded(PyExc_OSError, [&]() -> PyObject* {
        if (threads < 1 || threads > 1024) throw std::invalid_argument(std::to_string(threads) + " threads; 1 to 1024 are possible");
        auto movers = std::make_unique<Movers>(static_cast<size_t>(threads), loop_bytes);
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

PyObject* submit(PyObject* self, std::unique_ptr<PythonJob> job, PyObject* error = PyExc_RuntimeError) {
    return guarded(error, [&] {
        const Need need = job->begin();
        return PyLong_FromUnsignedLongLong(movers_of(self).submit(std::move(job), need));
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
    static const char* const names[] = {"connection", "capability", "epoch", "records", "namespace_digest", "fingerprints", "width",
                                        "region", "destinations", "check", "deadline_ns", nullptr};
    auto job = std::make_unique<TcpRead>();
    SlotRead& read = job->read;
    PyObject* connection = nullptr;
    if (!parse(args, kwargs, "O!y*Ky*y*y*Iw*y*pK:read_tcp", names, reinterpret_cast<MoversObject*>(self)->connection_type,
               &connection, &job->shown.view, &job->epoch, &read.records.view, &read.digest.view, &read.fingerprints.view, &read.width,
               &read.region.view, &read.destinations.view, &read.check, &read.deadline_ns))
        return nullptr;
    job->connection = Py_NewRef(connection);
    return submit(self, std::move(job));
}

PyObject* movers_connect_tcp(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"host", "port", "deadline_ns", "tls", nullptr};
    auto job = std::make_unique<TcpConnect>();
    const char* host = nullptr;
    int port = 0;
    unsigned long long deadline_ns = 0;
    PyObject* tls = nullptr;
    if (!parse(args, kwargs, "siK|$O:connect_tcp", names, &host, &port, &deadline_ns, &tls)) return nullptr;
    return guarded(PyExc_ConnectionError, [&] {
        require_target(port, deadline_ns);
        job->connection_type = reinterpret_cast<MoversObject*>(self)->connection_type;
        job->host = host;
        job->port = static_cast<uint16_t>(port);
        job->make = stream_maker(tls, tls::Side::CLIENT);
        job->deadline_ns = deadline_ns;
        return submit(self, std::move(job), PyExc_ConnectionError);
    });
}

PyObject* movers_abort(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"ticket", nullptr};
    unsigned long long ticket = 0;
    if (!parse(args, kwargs, "K:abort", names, &ticket)) return nullptr;
    movers_of(self).abort(ticket);
    Py_RETURN_NONE;
}

PyObject* movers_collect(PyObject* self, PyObject*) {
    std::vector<std::unique_ptr<Job>> jobs;
    if (movers_of(self).has_loop_jobs()) {
        const Unlocked unlocked;
        jobs = movers_of(self).collect();
    } else {
        jobs = movers_of(self).collect();
    }
    PyObject* list = PyList_New(0);
    for (const auto& job : jobs) {
        if (list == nullptr) return nullptr;
        PyObject* result = static_cast<PythonJob&>(*job).result();
        PyObject* pair = result == nullptr ? nullptr : Py_BuildValue("(KN)", static_cast<unsigned long long>(job->ticket), result);
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
    {"connect_tcp", method(movers_connect_tcp), METH_VARARGS | METH_KEYWORDS, "Begins to connect; returns its ticket."},
    {"abort", method(movers_abort), METH_VARARGS | METH_KEYWORDS, "Ends a job now, or makes it end soon."},
    {"collect", movers_collect, METH_NOARGS, "Jobs that have ended: [(ticket, result)]."},
    {"fileno", movers_fileno, METH_NOARGS, "Readable when `collect` has something."},
    {"close", movers_close, METH_NOARGS, "Aborts jobs, joins the threads; idempotent."},
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
