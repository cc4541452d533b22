// The tensors of a module's output: the one at a position, and the output with that one replaced.
// Positions count the leaves depth first. All functions need the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace flex_model {

// A new reference to the leaf at `index`. Out of range (negative too): nullptr without a Python
// error, and `*num_leaves` is how many there are. A cycle, a nesting too deep or failing user code:
// nullptr with a Python error. Tens of nanoseconds where `tree` is itself the tensor.
PyObject* leaf_at(PyObject* tree, Py_ssize_t index, Py_ssize_t* num_leaves);

// A new reference to a tree like `tree` with that leaf replaced; `leaf` may be any object. Only the
// containers on the way to it are rebuilt, each with its own type; all else is the very same
// object, and nothing is mutated. Fails as `leaf_at` does, but out of range is an IndexError.
PyObject* replace_leaf(PyObject* tree, Py_ssize_t index, PyObject* leaf);

// How many leaves there are; -1 with a Python error.
Py_ssize_t num_leaves(PyObject* tree);

// (list of leaves, TreeSpec): a new reference, or nullptr with a Python error.
PyObject* flatten(PyObject* tree);

// The inverse; `leaves` is an iterable of any objects. A new reference, or nullptr with an error.
PyObject* unflatten(PyObject* leaves, PyObject* spec);

// Sets the IndexError for a position out of range.
void set_index_error(const char* operation, Py_ssize_t num_leaves, Py_ssize_t index);

}  // namespace flex_model
