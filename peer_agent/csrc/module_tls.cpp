// peer_agent._native.TlsCredentials, and how the tcp types take it. Contract: peer_agent/_native.pyi.
#include <memory>

#include "binding.hpp"
#include "tls.hpp"

namespace kvdir::binding {
namespace {

struct CredentialsObject {
    PyObject_HEAD
    std::shared_ptr<tls::Credentials>* credentials;
    std::shared_ptr<tls::Counts>* counts;  // of our servers
};

PyObject* type_of_credentials = nullptr;  // for type checks; lives as long as the process

CredentialsObject* self_of(PyObject* object) { return reinterpret_cast<CredentialsObject*>(object); }

PyObject* credentials_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static const char* const names[] = {"certificate", "key", "ca", nullptr};
    const char *certificate = nullptr, *key = nullptr, *ca = nullptr;
    if (!parse(args, kwargs, "sss:TlsCredentials", names, &certificate, &key, &ca)) return nullptr;
    return guarded(PyExc_ValueError, [&]() -> PyObject* {
        auto loaded = std::make_unique<std::shared_ptr<tls::Credentials>>(
            std::make_shared<tls::Credentials>(tls::Files{certificate, key, ca}));
        auto counts = std::make_unique<std::shared_ptr<tls::Counts>>(std::make_shared<tls::Counts>());
        PyObject* self = allocate(type);
        if (self == nullptr) return nullptr;
        self_of(self)->credentials = loaded.release();
        self_of(self)->counts = counts.release();
        return self;
    });
}

void credentials_dealloc(PyObject* self) {
    delete self_of(self)->credentials;
    delete self_of(self)->counts;
    free_object(self);
}

PyObject* credentials_stats(PyObject* self, PyObject*) {
    return guarded(PyExc_RuntimeError, [&] {
        const tls::CredentialStats files = (*self_of(self)->credentials)->stats();
        const tls::Counts& counts = **self_of(self)->counts;
        return Py_BuildValue("{sKsKsKsKsKsKsKsKsK}", "handshakes", counts.done.load(), "not_tls", counts.not_tls.load(),
                             "no_certificate", counts.no_certificate.load(), "untrusted", counts.untrusted.load(), "refused_us",
                             counts.refused_us.load(), "broken", counts.broken.load(), "unfinished", counts.unfinished.load(),
                             "reloads", static_cast<unsigned long long>(files.reloads), "failed_reloads",
                             static_cast<unsigned long long>(files.failed_reloads));
    });
}

PyObject* credentials_failure(PyObject* self, void*) {
    return guarded(PyExc_RuntimeError,
                   [&] { return PyUnicode_FromString((*self_of(self)->credentials)->stats().failure.c_str()); });
}

PyObject* credentials_expires(PyObject* self, void*) {
    return guarded(PyExc_RuntimeError, [&] { return PyLong_FromLongLong((*self_of(self)->credentials)->stats().expires_unix_s); });
}

PyMethodDef methods[] = {
    {"stats", credentials_stats, METH_NOARGS, "How handshakes of our servers ended, and what the files are."},
    {nullptr, nullptr, 0, nullptr},
};
PyGetSetDef properties[] = {{"failure", credentials_failure, nullptr, "Why changed files are not used yet.", nullptr},
                            {"expires_unix_s", credentials_expires, nullptr, "When our certificate ends.", nullptr},
                            {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(credentials_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(credentials_dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_doc, const_cast<char*>("Certificate files of the tcp plane.")},
    {0, nullptr},
};
PyType_Spec spec = {"peer_agent._native.TlsCredentials", sizeof(CredentialsObject), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

MakeStream stream_maker(PyObject* tls, tls::Side side) {
    if (tls == nullptr || tls == Py_None) return plain_stream;
    if (PyObject_IsInstance(tls, type_of_credentials) != 1) throw std::invalid_argument("tls must be TlsCredentials or None");
    const CredentialsObject* const self = self_of(tls);
    return tls::make_tls(side, *self->credentials, side == tls::Side::SERVER ? *self->counts : nullptr);
}

int add_tls_type(PyObject* module) {
    return add_type(module, "TlsCredentials", &spec, &type_of_credentials);
}

}  // namespace kvdir::binding
