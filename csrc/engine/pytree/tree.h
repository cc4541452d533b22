// Access to the tensors of a module's output: find the tensor at an index, or replace it. Indices
// count the leaves depth first. All functions need the GIL.
#pragma once

#include "python_objects.h"

namespace flex_model {

// Returns the leaf at `index`. Out of range (negative too): null, and `*num_leaves` is their
// number. A cycle, a nesting too deep or failing user code is a Python error, here and below. Takes
// tens of nanoseconds if `tree` itself is the tensor.
py::object leaf_at(PyObject* tree, Py_ssize_t index, Py_ssize_t* num_leaves);

// Returns a tree like `tree` with that leaf replaced; `leaf` may be any object. Only the containers
// around it are rebuilt, each with its own type; everything else is the same object, and nothing is
// mutated. Out of range is an IndexError.
py::object replace_leaf(PyObject* tree, Py_ssize_t index, PyObject* leaf);

Py_ssize_t num_leaves(PyObject* tree);

// Returns (list of leaves, TreeSpec).
py::object flatten(PyObject* tree);

// The inverse of flatten; `leaves` is an iterable of any objects.
py::object unflatten(PyObject* leaves, PyObject* spec);

// Throws the IndexError for an index out of range.
[[noreturn]] void throw_index_error(const char* operation, Py_ssize_t num_leaves, Py_ssize_t index);

}  // namespace flex_model
