// One container, split into its children and the state needed to rebuild it.
#pragma once

#include "pytree/registry.h"

namespace flex_model {

// The children are a snapshot: user code may change the container during the traversal.
//   structure  what specs compare: the keys of a dict; (keys or None, names of the attributes that
//              are children) of a structural type; the context of a registered type; or null
//   state      what they do not: (attributes, slots...) of a structural type, the unflatten
//              function of a registered one; or null
struct Opened {
  Kind kind = Kind::kConstant;
  py::object children;  // a tuple, or a list without other references
  py::object structure;
  py::object state;

  PyObject** begin() const { return PySequence_Fast_ITEMS(children.ptr()); }
  Py_ssize_t size() const { return PySequence_Fast_GET_SIZE(children.ptr()); }
};

// Classifies `object` and flattens it by one level if it is a container; for a leaf or a constant
// only `kind` is set. `structure` and `state` are filled for `to_rebuild`.
Opened open(PyObject* object, bool to_rebuild);

// A new container of `type` with these children.
py::object build(Kind kind, PyTypeObject* type, PyObject* structure, PyObject* state,
                 PyObject* const* children, Py_ssize_t size);

// For structural types (structural.cpp).
void open_structural(PyObject* object, const ContainerType& type, bool to_rebuild, Opened* opened);
py::object build_structural(PyTypeObject* type, PyObject* structure, PyObject* state,
                            PyObject* const* children, Py_ssize_t size);

// A snapshot of the values, and of the keys if `keys` is given, in insertion order.
py::object dict_items(PyObject* dict, py::object* keys);

py::object make_tuple(PyObject* const* items, Py_ssize_t size);
py::object make_list(PyObject* const* items, Py_ssize_t size);

// The containers around the current one, innermost first.
struct Path {
  static constexpr int kMaxDepth = 1000;  // bounds the C stack: about 300 bytes per level

  PyObject* container;
  const Path* parent;
  int depth;

  // ValueError if the container is inside itself, RecursionError if it is too deep.
  Path(PyObject* container, const Path* parent, const char* operation);
};

}  // namespace flex_model
