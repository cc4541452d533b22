// The traversals of a tree: all leaves with a spec, one leaf, or the number of leaves. Each level
// is a C++ call, so Path limits the depth before the C stack overflows.
#include "pytree/tree.h"
#include "pytree/tree_spec.h"

namespace flex_model {
namespace {

struct Flattening {
  std::vector<Node> nodes;
  PyObject* leaves;

  bool visit(PyObject* object, const Path* parent) {
    Opened opened;
    if (!open(object, /*to_rebuild=*/true, &opened)) return false;
    if (opened.kind == Kind::kLeaf) {
      nodes.emplace_back().kind = Kind::kLeaf;
      return PyList_Append(leaves, object) == 0;
    }
    if (opened.kind == Kind::kConstant) {
      nodes.emplace_back().structure = borrow(object);
      return true;
    }
    const Path path(object, parent);
    if (!path.check("flatten")) return false;
    for (Py_ssize_t i = 0; i < opened.size(); ++i) {
      if (!visit(opened.begin()[i], &path)) return false;
    }
    Node& node = nodes.emplace_back();
    node.kind = opened.kind;
    node.size = opened.size();
    if (opened.kind == Kind::kStructural || opened.kind == Kind::kRegistered) {
      node.type = borrow(reinterpret_cast<PyObject*>(Py_TYPE(object)));
    }
    node.structure = std::move(opened.structure);
    node.state = std::move(opened.state);
    return true;
  }
};

// Counts leaves up to the one at `index`; `found` is that leaf or, with a replacement, the rebuilt
// `object`.
struct Search {
  const char* operation;
  Py_ssize_t index;
  PyObject* replacement;
  Py_ssize_t count = 0;
  py::object found{};

  bool visit(PyObject* object, const Path* parent) {
    Opened opened;
    if (!open(object, /*to_rebuild=*/replacement != nullptr, &opened)) return false;
    if (opened.kind == Kind::kConstant) return true;
    if (opened.kind == Kind::kLeaf) {
      if (count++ == index) found = borrow(replacement != nullptr ? replacement : object);
      return true;
    }
    const Path path(object, parent);
    if (!path.check(operation)) return false;
    for (Py_ssize_t i = 0; i < opened.size(); ++i) {
      if (!visit(opened.begin()[i], &path)) return false;
      if (!found) continue;
      return replacement == nullptr || rebuild(object, opened, i);
    }
    return true;
  }

  bool rebuild(PyObject* object, const Opened& opened, Py_ssize_t at) {
    std::vector<PyObject*> children(opened.begin(), opened.begin() + opened.size());
    children[at] = found.ptr();
    found = steal(build(opened.kind, Py_TYPE(object), opened.structure.ptr(), opened.state.ptr(),
                        children.data(), opened.size()));
    return static_cast<bool>(found);
  }
};

}  // namespace

PyObject* flatten(PyObject* tree) {
  if (!is_ready()) return nullptr;
  py::object leaves = steal(PyList_New(0));
  if (!leaves) return nullptr;
  Flattening flattening{{}, leaves.ptr()};
  flattening.nodes.reserve(16);
  if (!flattening.visit(tree, nullptr)) return nullptr;
  const Py_ssize_t size = PyList_GET_SIZE(leaves.ptr());
  const py::object spec = steal(make_tree_spec(std::move(flattening.nodes), size));
  if (!spec) return nullptr;
  PyObject* pair[] = {leaves.ptr(), spec.ptr()};
  return make_tuple(pair, 2).release().ptr();
}

PyObject* leaf_at(PyObject* tree, Py_ssize_t index, Py_ssize_t* num_leaves) {
  if (!is_ready()) return nullptr;
  if (Py_TYPE(tree) == leaf_type && index == 0) {
    Py_INCREF(tree);
    return tree;
  }
  Search search{"leaf_at", index, nullptr};
  if (!search.visit(tree, nullptr)) return nullptr;
  *num_leaves = search.count;
  return search.found.release().ptr();
}

PyObject* replace_leaf(PyObject* tree, Py_ssize_t index, PyObject* leaf) {
  if (!is_ready()) return nullptr;
  Search search{"replace_leaf", index, leaf};
  if (!search.visit(tree, nullptr)) return nullptr;
  if (search.found) return search.found.release().ptr();
  set_index_error("replace_leaf", search.count, index);
  return nullptr;
}

Py_ssize_t num_leaves(PyObject* tree) {
  if (!is_ready()) return -1;
  Search search{"num_leaves", -1, nullptr};
  return search.visit(tree, nullptr) ? search.count : -1;
}

void set_index_error(const char* operation, Py_ssize_t num_leaves, Py_ssize_t index) {
  if (num_leaves == 0) {
    PyErr_Format(
        PyExc_IndexError,
        "%s: the tree has 0 tensors; unpack_idx %zd is out of range; register the type that "
        "holds them with flex_model.pytree.register",
        operation, index);
    return;
  }
  PyErr_Format(
      PyExc_IndexError,
      "%s: the tree has %zd tensor%s; unpack_idx %zd is out of range; pass an index in [0, %zd]",
      operation, num_leaves, num_leaves == 1 ? "" : "s", index, num_leaves - 1);
}

}  // namespace flex_model
