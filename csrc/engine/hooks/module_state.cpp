#include "module_state.h"

#include <string>
#include <string_view>

namespace flex_model {
namespace {

constexpr int kMaxDepth = 3;          // of containers and objects, such as a nested configuration
constexpr Py_ssize_t kMaxItems = 64;  // longer containers are data: only their lengths count

// What `nn.Module` itself makes, and `forward`, which is compared by identity. Interned, as names
// of attributes are, so that they are found by identity.
bool is_made_by_torch(PyObject* name, PyTypeObject* module_type) {
  static const std::unordered_set<PyObject*> kNames = [module_type] {
    std::unordered_set<PyObject*> names{PyUnicode_InternFromString("forward")};
    const py::object module = py::handle(reinterpret_cast<PyObject*>(module_type))();
    for (const auto& item : py::dict(module.attr("__dict__"))) {
      names.insert(borrow(item.first.ptr()).release().ptr());
    }
    return names;
  }();
  return kNames.count(name) != 0;
}

// The name of the Python module that defines a class; empty where it has none.
std::string module_of(PyTypeObject* type) {
  static PyObject* const kName = PyUnicode_InternFromString("__module__");
  const py::object name = steal(PyObject_GetAttr(reinterpret_cast<PyObject*>(type), kName));
  const char* text = name && PyUnicode_Check(name.ptr()) ? PyUnicode_AsUTF8(name.ptr()) : nullptr;
  PyErr_Clear();
  return text == nullptr ? "" : text;
}

bool starts_with(const std::string& text, std::string_view start) {
  return text.compare(0, start.size(), start) == 0;
}

bool is_number_or_text(PyObject* value) {
  return PyUnicode_CheckExact(value) || PyLong_CheckExact(value) || PyBool_Check(value) ||
         PyFloat_CheckExact(value) || PyBytes_CheckExact(value) || PyComplex_CheckExact(value);
}

bool has_dict(PyTypeObject* type) {
#ifdef Py_TPFLAGS_MANAGED_DICT
  if (PyType_HasFeature(type, Py_TPFLAGS_MANAGED_DICT)) return true;
#endif
  return type->tp_dictoffset != 0;
}

}  // namespace

StateHash::StateHash(PyObject* tensor_type, PyObject* module_type)
    : tensor_type_(reinterpret_cast<PyTypeObject*>(tensor_type)),
      module_type_(reinterpret_cast<PyTypeObject*>(module_type)) {}

void StateHash::add_module(PyObject* module, PyObject* dict) {
  const auto [at, is_new] = is_around_.try_emplace(Py_TYPE(module));
  if (is_new) {
    const std::string name = module_of(Py_TYPE(module));
    at->second = starts_with(name, "torch.") && !starts_with(name, "torch.nn.modules.");
  }
  if (!at->second) add_dict(dict, 0);
}

void StateHash::add(PyObject* value, int depth) {
  mix(static_cast<const void*>(Py_TYPE(value)));
  if (is_number_or_text(value)) {  // as most are
    const Py_hash_t hash = PyObject_Hash(value);
    throw_if(hash == -1 && PyErr_Occurred());
    mix(static_cast<uint64_t>(hash));
    return;
  }
  if (add_code_or_tensor(value) || depth >= kMaxDepth || !seen_.insert(value).second) return;
  if (!add_container(value, depth)) add_object(value, depth);
}

// Whether the value is code, a module or a tensor. (Functions that are made anew for each forward
// have the same code.)
bool StateHash::add_code_or_tensor(PyObject* value) {
  if (value == Py_None || PyType_Check(value) || PyModule_Check(value) ||
      PyType_IsSubtype(Py_TYPE(value), module_type_) != 0) {
    mix(static_cast<const void*>(value));
    return true;
  }
  if (PyType_IsSubtype(Py_TYPE(value), tensor_type_) != 0) return true;
  if (PyFunction_Check(value)) {
    mix(static_cast<const void*>(PyFunction_GET_CODE(value)));
    return true;
  }
  if (PyCFunction_Check(value)) {
    mix(reinterpret_cast<uintptr_t>(PyCFunction_GET_FUNCTION(value)));
    return true;
  }
  return PyMethod_Check(value) && add_code_or_tensor(PyMethod_GET_FUNCTION(value));
}

bool StateHash::add_container(PyObject* value, int depth) {
  if (PyTuple_Check(value) || PyList_Check(value)) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
    mix(static_cast<uint64_t>(size));
    for (Py_ssize_t i = 0; i < size && size <= kMaxItems; ++i) {
      add(PySequence_Fast_GET_ITEM(value, i), depth + 1);
    }
    return true;
  }
  if (PyDict_Check(value)) {
    mix(static_cast<uint64_t>(PyDict_GET_SIZE(value)));
    if (PyDict_GET_SIZE(value) <= kMaxItems) add_dict(value, depth + 1);
    return true;
  }
  if (PyAnySet_CheckExact(value)) {
    mix(static_cast<uint64_t>(PySet_GET_SIZE(value)));
    if (PySet_GET_SIZE(value) > kMaxItems) return true;
    uint64_t sum = 0;  // equal sets may have other orders
    for (const py::handle item : borrow(value)) {
      const uint64_t before = hash_;
      hash_ = 0;
      add(item.ptr(), depth + 1);
      sum += hash_;
      hash_ = before;
    }
    mix(sum);
    return true;
  }
  return false;
}

// The attributes of an object, such as a configuration. (Torch's objects are about processes,
// devices and streams.)
void StateHash::add_object(PyObject* value, int depth) {
  if (!has_dict(Py_TYPE(value)) || starts_with(module_of(Py_TYPE(value)), "torch.")) return;
  const py::object dict = steal(PyObject_GenericGetDict(value, nullptr));
  if (!dict) {
    PyErr_Clear();
    return;
  }
  if (PyDict_Check(dict.ptr())) add_dict(dict.ptr(), depth + 1);
}

void StateHash::add_dict(PyObject* dict, int depth) {
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value);) {
    if (depth == 0 && is_made_by_torch(key, module_type_)) continue;
    add(key, depth);
    add(value, depth);
  }
}

}  // namespace flex_model
