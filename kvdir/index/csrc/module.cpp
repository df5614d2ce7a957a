// Python module kvdir.index._native: thin binding of the core against the limited API of CPython 3.11.
#include "python.hpp"

namespace kvdir::python {

namespace {

ModuleState& state_of_module(PyObject* module) { return *static_cast<ModuleState*>(PyModule_GetState(module)); }

// The answers are named tuples of Python, so that their documentation and types have one home.
bool load_answers(ModuleState& state) {
    Ref answers(PyImport_ImportModule("kvdir.index.answers"));
    if (!answers) return false;
    state.lookup_type = PyObject_GetAttrString(answers.get(), "Lookup");
    state.stats_type = PyObject_GetAttrString(answers.get(), "IndexStats");
    state.region_lookup_type = PyObject_GetAttrString(answers.get(), "RegionLookup");
    state.evicted_type = PyObject_GetAttrString(answers.get(), "Evicted");
    return state.lookup_type && state.stats_type && state.region_lookup_type && state.evicted_type;
}

PyObject* add_type(PyObject* module, PyType_Spec& spec) {
    PyObject* type = PyType_FromModuleAndSpec(module, &spec, nullptr);
    if (type && PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type)) != 0) Py_CLEAR(type);
    return type;
}

int exec(PyObject* module) {
    ModuleState& state = state_of_module(module);
    if (!load_answers(state)) return -1;
    state.sketch_type = add_type(module, sketch_spec);
    if (!state.sketch_type) return -1;
    Ref index(add_type(module, index_spec));
    Ref region(add_type(module, region_index_spec));
    Ref reader(add_type(module, region_reader_spec));
    Ref floor(add_type(module, gather_floor_spec));
    return index && region && reader && floor ? 0 : -1;
}

int traverse(PyObject* module, visitproc visit, void* arg) {
    ModuleState& state = state_of_module(module);
    Py_VISIT(state.lookup_type);
    Py_VISIT(state.stats_type);
    Py_VISIT(state.region_lookup_type);
    Py_VISIT(state.evicted_type);
    Py_VISIT(state.sketch_type);
    return 0;
}

int clear(PyObject* module) {
    ModuleState& state = state_of_module(module);
    Py_CLEAR(state.lookup_type);
    Py_CLEAR(state.stats_type);
    Py_CLEAR(state.region_lookup_type);
    Py_CLEAR(state.evicted_type);
    Py_CLEAR(state.sketch_type);
    return 0;
}

void release(void* module) { clear(static_cast<PyObject*>(module)); }

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(exec)},
    {0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "kvdir.index._native", "Native core of the block index; see kvdir.index.",
    sizeof(ModuleState),   nullptr,               slots,
    traverse,              clear,                 release,
};

}  // namespace

}  // namespace kvdir::python

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&kvdir::python::definition); }
