// Builds a tree from a spec and leaves, in postorder with a stack, without recursion.
#include "pytree/tree.h"
#include "pytree/tree_spec.h"

namespace flex_model {
namespace {

// Owns its items, so that an error leaks nothing.
struct Stack {
  std::vector<PyObject*> items;

  ~Stack() { pop(items.size()); }

  void push(PyObject* item) { items.push_back(item); }

  void pop(size_t count) {
    for (; count > 0; --count) {
      PyObject* item = items.back();
      items.pop_back();
      Py_DECREF(item);
    }
  }
};

}  // namespace

py::object unflatten(PyObject* leaves, PyObject* spec_object) {
  const TreeSpec* spec = as_tree_spec(spec_object);
  if (spec == nullptr) {
    throw_error(
        PyExc_TypeError,
        "unflatten: expected a TreeSpec, got %.200s; call unflatten(leaves, spec) with what "
        "flatten returned",
        Py_TYPE(spec_object)->tp_name);
  }
  // A tuple, which user code that runs meanwhile can't change.
  const py::object given = checked(PySequence_Tuple(leaves));
  if (PyTuple_GET_SIZE(given.ptr()) != spec->num_leaves) {
    throw_error(PyExc_ValueError,
                "unflatten: the spec has %zd leaves, got %zd; pass as many as flatten returned",
                spec->num_leaves, PyTuple_GET_SIZE(given.ptr()));
  }
  const py::object alive = borrow(spec_object);
  Stack stack;
  stack.items.reserve(spec->nodes.size());
  Py_ssize_t next = 0;
  for (const Node& node : spec->nodes) {
    if (node.kind == Kind::kLeaf || node.kind == Kind::kConstant) {
      PyObject* item =
          node.kind == Kind::kLeaf ? PyTuple_GET_ITEM(given.ptr(), next++) : node.structure.ptr();
      Py_INCREF(item);
      stack.push(item);
      continue;
    }
    const size_t size = static_cast<size_t>(node.size);
    py::object made =
        build(node.kind, reinterpret_cast<PyTypeObject*>(node.type.ptr()), node.structure.ptr(),
              node.state.ptr(), stack.items.data() + stack.items.size() - size, node.size);
    stack.pop(size);
    stack.push(made.release().ptr());
  }
  PyObject* root = stack.items.back();
  stack.items.pop_back();
  return steal(root);
}

}  // namespace flex_model
