// Access to the tensors of a module's output: find the tensor at an index, or replace it. Indices
// count the leaves depth first. All functions need the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace flex_model {

// Returns a new reference to the leaf at `index`. Out of range (negative too): nullptr without a
// Python error, and `*num_leaves` is their number. A cycle, a nesting too deep or failing user
// code: nullptr with a Python error. Takes tens of nanoseconds if `tree` itself is the tensor.
PyObject* leaf_at(PyObject* tree, Py_ssize_t index, Py_ssize_t* num_leaves);

// Returns a new reference to a tree like `tree` with that leaf replaced; `leaf` may be any object.
// Only the containers around it are rebuilt, each with its own type; everything else is the same
// object, and nothing is mutated. Fails as `leaf_at` does, but out of range is an IndexError.
PyObject* replace_leaf(PyObject* tree, Py_ssize_t index, PyObject* leaf);

// Returns the number of leaves; -1 with a Python error.
Py_ssize_t num_leaves(PyObject* tree);

// Returns a new reference to (list of leaves, TreeSpec), or nullptr with a Python error.
PyObject* flatten(PyObject* tree);

// The inverse of flatten; `leaves` is an iterable of any objects. Returns a new reference, or
// nullptr with a Python error.
PyObject* unflatten(PyObject* leaves, PyObject* spec);

// Sets the IndexError for an index out of range.
void set_index_error(const char* operation, Py_ssize_t num_leaves, Py_ssize_t index);

}  // namespace flex_model
