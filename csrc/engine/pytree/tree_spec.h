// TreeSpec: a tree without its leaves, immutable. Holds the constants and keys, never a leaf.
//
// The nodes are in postorder: children, left to right, before their container. So a tree is rebuilt
// with a stack and no recursion, and a spec of any depth is destroyed without recursion.
#pragma once

#include <vector>

#include "pytree/container.h"

namespace flex_model {

struct Node {
  Kind kind = Kind::kConstant;
  Py_ssize_t size = 0;   // children
  py::object type;       // the type of a structural or registered container
  py::object structure;  // see Opened; the object itself if it is a constant
  py::object state;
};

struct TreeSpec {
  PyObject_HEAD Py_ssize_t num_leaves;
  std::vector<Node> nodes;  // the last one is the root
};

py::object make_tree_spec(std::vector<Node> nodes, Py_ssize_t num_leaves);

// Returns a borrowed pointer; nullptr if the object is not a TreeSpec.
const TreeSpec* as_tree_spec(PyObject* object);

// Returns the Python type, made at the first call.
py::object tree_spec_type();

}  // namespace flex_model
