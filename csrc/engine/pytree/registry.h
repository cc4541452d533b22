// The kind of each Python type in a traversal: a leaf, a container, or a constant.
//
// A type is looked up in this order:
//   1. exact tuple, list, dict and the common constants, without any table
//   2. the leaf type and its subclasses
//   3. types registered with flex_model.pytree.register: this exact type, subclasses do not inherit
//   4. structural types that take precedence over torch (Hugging Face's, OrderedDict, defaultdict)
//   5. types in torch.utils._pytree's registry, looked up every time, since it may change
//   6. other structural types: subclasses of tuple, list and dict, dataclasses, UserDicts
//   7. everything else is a constant
// 4, 6 and 7 are looked up once per type and cached until the type dies.
#pragma once

#include <cstdint>
#include <vector>

#include "python_objects.h"

namespace flex_model {

enum class Kind : uint8_t { kConstant, kLeaf, kTuple, kList, kDict, kStructural, kRegistered };

// The built-in type whose storage holds the items of a structural container.
enum class Storage : uint8_t { kNone, kTuple, kList, kDict, kOrderedDict, kStructSequence };

// An attribute kept in the object itself (__slots__, defaultdict.default_factory): a PyObject* at
// `offset`, which may be null.
struct Slot {
  py::object name;
  Py_ssize_t offset;
};

struct ContainerType {
  py::object flatten, unflatten;  // of flex_model.pytree.register; null if there are none
  py::object
      attributes;  // names whose values are children: a tuple, or a function of the object; or null
  std::vector<Slot> slots;
  py::object weakref;  // its callback erases this entry
  Storage storage = Storage::kNone;
  bool is_leaf = false;
  bool is_structural = false;
  bool is_before_torch = false;
  bool has_dict = false;
};

struct Classified {
  Kind kind = Kind::kConstant;
  const ContainerType* type = nullptr;  // of kStructural
  py::object flatten{}, unflatten{};    // of kRegistered
  bool is_torch = false;                // registered with torch, for error messages
};

extern PyTypeObject* leaf_type;  // null until flex_model.pytree is imported

// Imports flex_model.pytree if need be, which sets the leaf type; every traversal begins here.
inline void require_leaf_type() {
  if (leaf_type == nullptr) py::module_::import("flex_model.pytree");
}

// Classifies the common types without a table; if it returns false, call `classify`.
inline bool classify_builtin(PyObject* object, Kind* kind) {
  PyTypeObject* type = Py_TYPE(object);
  if (type == leaf_type) return *kind = Kind::kLeaf, true;
  if (type == &PyTuple_Type) return *kind = Kind::kTuple, true;
  if (type == &PyList_Type) return *kind = Kind::kList, true;
  if (type == &PyDict_Type) return *kind = Kind::kDict, true;
  *kind = Kind::kConstant;
  return object == Py_None || type == &PyLong_Type || type == &PyFloat_Type ||
         type == &PyBool_Type || type == &PyUnicode_Type;
}

Classified classify(PyObject* object);

// Returns the entry of a type, made if need be.
ContainerType& container_type(PyTypeObject* type);

// flex_model.pytree calls these two, the leaf type last. `describe(type)` is None or (attributes or
// None, whether it precedes torch's registry); `torch_registry` maps a type to an object with
// `flatten_fn` and `unflatten_fn`.
void set_type_sources(py::function describe, py::dict torch_registry);
void set_leaf_type(py::type type);

void register_container(py::type type, py::function flatten, py::function unflatten);
void unregister_container(py::type type);
void register_leaf(py::type type);
size_t num_known_types();

}  // namespace flex_model
