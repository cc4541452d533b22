// The traversals of a tree: all leaves with a spec, one leaf, or the number of leaves. Each level
// is a C++ call, so Path limits the depth before the C stack overflows.
#include "pytree/tree.h"
#include "pytree/tree_spec.h"

namespace flex_model {
namespace {

struct Flattening {
  std::vector<Node> nodes{};
  py::list leaves{};

  void visit(PyObject* object, const Path* parent) {
    Opened opened = open(object, /*to_rebuild=*/true);
    if (opened.kind == Kind::kLeaf) {
      nodes.emplace_back().kind = Kind::kLeaf;
      return throw_if(PyList_Append(leaves.ptr(), object) < 0);
    }
    if (opened.kind == Kind::kConstant) {
      nodes.emplace_back().structure = borrow(object);
      return;
    }
    const Path path(object, parent, "flatten");
    for (Py_ssize_t i = 0; i < opened.size(); ++i) visit(opened.begin()[i], &path);
    Node& node = nodes.emplace_back();
    node.kind = opened.kind;
    node.size = opened.size();
    if (opened.kind == Kind::kStructural || opened.kind == Kind::kRegistered) {
      node.type = borrow(reinterpret_cast<PyObject*>(Py_TYPE(object)));
    }
    node.structure = std::move(opened.structure);
    node.state = std::move(opened.state);
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

  void visit(PyObject* object, const Path* parent) {
    const Opened opened = open(object, /*to_rebuild=*/replacement != nullptr);
    if (opened.kind == Kind::kConstant) return;
    if (opened.kind == Kind::kLeaf) {
      if (count++ == index) found = borrow(replacement != nullptr ? replacement : object);
      return;
    }
    const Path path(object, parent, operation);
    for (Py_ssize_t i = 0; i < opened.size(); ++i) {
      visit(opened.begin()[i], &path);
      if (!found) continue;
      if (replacement != nullptr) rebuild(object, opened, i);
      return;
    }
  }

  void rebuild(PyObject* object, const Opened& opened, Py_ssize_t at) {
    std::vector<PyObject*> children(opened.begin(), opened.begin() + opened.size());
    children[at] = found.ptr();
    found = build(opened.kind, Py_TYPE(object), opened.structure.ptr(), opened.state.ptr(),
                  children.data(), opened.size());
  }
};

}  // namespace

py::object flatten(PyObject* tree) {
  require_leaf_type();
  Flattening flattening;
  flattening.nodes.reserve(16);
  flattening.visit(tree, nullptr);
  const Py_ssize_t size = PyList_GET_SIZE(flattening.leaves.ptr());
  const py::object spec = make_tree_spec(std::move(flattening.nodes), size);
  PyObject* pair[] = {flattening.leaves.ptr(), spec.ptr()};
  return make_tuple(pair, 2);
}

py::object leaf_at(PyObject* tree, Py_ssize_t index, Py_ssize_t* num_leaves) {
  require_leaf_type();
  if (Py_TYPE(tree) == leaf_type && index == 0) return borrow(tree);
  Search search{"leaf_at", index, nullptr};
  search.visit(tree, nullptr);
  *num_leaves = search.count;
  return std::move(search.found);
}

py::object replace_leaf(PyObject* tree, Py_ssize_t index, PyObject* leaf) {
  require_leaf_type();
  Search search{"replace_leaf", index, leaf};
  search.visit(tree, nullptr);
  if (!search.found) throw_index_error("replace_leaf", search.count, index);
  return std::move(search.found);
}

Py_ssize_t num_leaves(PyObject* tree) {
  require_leaf_type();
  Search search{"num_leaves", -1, nullptr};
  search.visit(tree, nullptr);
  return search.count;
}

void throw_index_error(const char* operation, Py_ssize_t num_leaves, Py_ssize_t index) {
  if (num_leaves == 0) {
    throw_error(PyExc_IndexError,
                "%s: the tree has 0 tensors; unpack_idx %zd is out of range; register the type "
                "that holds them with flex_model.pytree.register",
                operation, index);
  }
  throw_error(
      PyExc_IndexError,
      "%s: the tree has %zd tensor%s; unpack_idx %zd is out of range; pass an index in [0, %zd]",
      operation, num_leaves, num_leaves == 1 ? "" : "s", index, num_leaves - 1);
}

}  // namespace flex_model
