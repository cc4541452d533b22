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
// only `kind` is set. `structure` and `state` are filled for `to_rebuild`. False with a Python
// error.
bool open(PyObject* object, bool to_rebuild, Opened* opened);

// A new container of `type` with these children; nullptr with a Python error.
PyObject* build(Kind kind, PyTypeObject* type, PyObject* structure, PyObject* state,
                PyObject* const* children, Py_ssize_t size);

// For structural types (structural.cpp).
bool open_structural(PyObject* object, const ContainerType& type, bool to_rebuild, Opened* opened);
PyObject* build_structural(PyTypeObject* type, PyObject* structure, PyObject* state,
                           PyObject* const* children, Py_ssize_t size);

// Snapshots of the keys (if `keys` is given) and the values, in insertion order.
bool dict_items(PyObject* dict, py::object* keys, py::object* values);

py::object make_tuple(PyObject* const* items, Py_ssize_t size);
py::object make_list(PyObject* const* items, Py_ssize_t size);

// The containers around the current one, innermost first.
struct Path {
  static constexpr int kMaxDepth = 1000;  // bounds the C stack: about 300 bytes per level

  PyObject* container;
  const Path* parent;
  int depth;

  Path(PyObject* container, const Path* parent)
      : container(container), parent(parent), depth(parent == nullptr ? 1 : parent->depth + 1) {}

  // False with a ValueError if the container is inside itself, a RecursionError if it is too deep.
  bool check(const char* operation) const;
};

}  // namespace flex_model
