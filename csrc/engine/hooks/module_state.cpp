#include "module_state.h"

#include <structmember.h>

#include <cstring>
#include <string>
#include <string_view>

namespace flex_model {
namespace {

constexpr int kMaxDepth = 3;          // of containers and objects, such as a nested configuration
constexpr Py_ssize_t kMaxItems = 64;  // of longer containers, numbers, texts and code alone count
constexpr Py_ssize_t kMaxBytes = 64;  // of a buffer, such as a NumPy scalar; longer ones are data

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

uint64_t bits(double number) {
  uint64_t result;
  std::memcpy(&result, &number, sizeof result);
  return result;
}

int depth_inside(Py_ssize_t size, int depth) { return size > kMaxItems ? kMaxDepth : depth + 1; }

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
  const bool is_plain = add_number_or_text(value);  // as most are
  if (is_plain && !PyType_HasFeature(Py_TYPE(value), Py_TPFLAGS_HEAPTYPE)) return;
  if (add_code_or_tensor(value, depth) || depth >= kMaxDepth || !seen_.insert(value).second) return;
  if (!add_container(value, depth)) add_object(value, depth);
}

// Numbers by their bits: -1 and -2 have one hash.
bool StateHash::add_number_or_text(PyObject* value) {
  if (PyUnicode_Check(value)) {
    mix(static_cast<uint64_t>(PyUnicode_Type.tp_hash(value)));
  } else if (PyLong_Check(value)) {
    int is_long = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &is_long);
    mix(static_cast<uint64_t>(is_long ? PyLong_Type.tp_hash(value) : number));
  } else if (PyFloat_Check(value)) {
    mix(bits(PyFloat_AS_DOUBLE(value)));
  } else if (PyBytes_Check(value)) {
    mix(static_cast<uint64_t>(PyBytes_Type.tp_hash(value)));
  } else if (PyComplex_Check(value)) {
    mix(bits(PyComplex_RealAsDouble(value)));
    mix(bits(PyComplex_ImagAsDouble(value)));
  } else {
    return false;
  }
  return true;
}

// Whether the value is code, a module or a tensor. (Functions that are made anew for each forward
// have the same code.)
bool StateHash::add_code_or_tensor(PyObject* value, int depth) {
  if (value == Py_None || PyType_Check(value) || PyModule_Check(value) ||
      PyType_IsSubtype(Py_TYPE(value), module_type_) != 0) {
    mix(static_cast<const void*>(value));
    return true;
  }
  if (PyType_IsSubtype(Py_TYPE(value), tensor_type_) != 0) return true;
  if (PyFunction_Check(value)) {
    add_function(value, depth);
    return true;
  }
  if (PyCFunction_Check(value)) {
    mix(reinterpret_cast<uintptr_t>(PyCFunction_GET_FUNCTION(value)));
    return true;
  }
  if (PyMethod_Check(value)) {
    add(PyMethod_GET_FUNCTION(value), depth);
    add(PyMethod_GET_SELF(value), depth + 1);
    return true;
  }
  return false;
}

void StateHash::add_function(PyObject* function, int depth) {
  mix(static_cast<const void*>(PyFunction_GET_CODE(function)));
  if (depth >= kMaxDepth || !seen_.insert(function).second) return;
  for (PyObject* held : {PyFunction_GET_DEFAULTS(function), PyFunction_GET_KW_DEFAULTS(function)}) {
    if (held != nullptr) add(held, depth + 1);
  }
  PyObject* cells = PyFunction_GET_CLOSURE(function);
  for (Py_ssize_t i = 0; cells != nullptr && i < PyTuple_GET_SIZE(cells); ++i) {
    PyObject* held = PyCell_GET(PyTuple_GET_ITEM(cells, i));
    if (held != nullptr) add(held, depth + 1);
  }
}

bool StateHash::add_container(PyObject* value, int depth) {
  if (PyTuple_Check(value) || PyList_Check(value)) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
    mix(static_cast<uint64_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      add(PySequence_Fast_GET_ITEM(value, i), depth_inside(size, depth));
    }
    return true;
  }
  if (PyDict_Check(value)) {
    mix(static_cast<uint64_t>(PyDict_GET_SIZE(value)));
    add_dict(value, depth_inside(PyDict_GET_SIZE(value), depth));
    return true;
  }
  if (PyAnySet_CheckExact(value)) {
    mix(static_cast<uint64_t>(PySet_GET_SIZE(value)));
    uint64_t sum = 0;  // equal sets may have other orders
    for (const py::handle item : borrow(value)) {
      const uint64_t before = hash_;
      hash_ = 0;
      add(item.ptr(), depth_inside(PySet_GET_SIZE(value), depth));
      sum += hash_;
      hash_ = before;
    }
    mix(sum);
    return true;
  }
  return false;
}

// The attributes of an object, such as a configuration: its slots (those of `functools.partial`
// and slices, too) and its dict. (Torch's objects are about processes, devices and streams.)
void StateHash::add_object(PyObject* value, int depth) {
  PyTypeObject* const type = Py_TYPE(value);
  const std::string module = module_of(type);
  if (starts_with(module, "torch.")) return;
  if (PyObject_CheckBuffer(value)) add_buffer(value);
  for (const py::handle base : borrow(type->tp_mro)) {
    const PyMemberDef* slot = reinterpret_cast<PyTypeObject*>(base.ptr())->tp_members;
    for (; slot != nullptr && slot->name != nullptr; ++slot) {
      if (slot->type != T_OBJECT && slot->type != T_OBJECT_EX) continue;
      mix(static_cast<const void*>(slot->name));
      const char* const at = reinterpret_cast<const char*>(value) + slot->offset;
      PyObject* const held = *reinterpret_cast<PyObject* const*>(at);
      if (held != nullptr) add(held, depth + 1);
    }
  }
  if (has_dict(type)) {
    const py::object dict = steal(PyObject_GenericGetDict(value, nullptr));
    PyErr_Clear();
    if (dict && PyDict_Check(dict.ptr())) add_dict(dict.ptr(), depth + 1);
  } else if (module == "operator") {  // an itemgetter or the like
    add(checked(PyObject_Repr(value)).ptr(), depth);
  } else if (module == "collections" && PySequence_Check(value)) {  // a deque
    const py::object items = checked(PySequence_List(value));
    for (const py::handle item : items) add(item.ptr(), depth_inside(py::len(items), depth));
  }
}

void StateHash::add_buffer(PyObject* value) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(value, &buffer, PyBUF_SIMPLE) != 0) return PyErr_Clear();
  const auto* const bytes = static_cast<const unsigned char*>(buffer.buf);
  mix(static_cast<uint64_t>(buffer.len));
  for (Py_ssize_t i = 0; i < buffer.len && buffer.len <= kMaxBytes; ++i) mix(uint64_t{bytes[i]});
  PyBuffer_Release(&buffer);
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
