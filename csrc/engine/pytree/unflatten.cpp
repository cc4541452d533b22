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

void set_count_error(Py_ssize_t expected, Py_ssize_t got) {
  PyErr_Format(PyExc_ValueError,
               "unflatten: the spec has %zd leaves, got %zd; pass as many as flatten returned",
               expected, got);
}

}  // namespace

PyObject* unflatten(PyObject* leaves, PyObject* spec_object) {
  const TreeSpec* spec = as_tree_spec(spec_object);
  if (spec == nullptr) {
    PyErr_Format(
        PyExc_TypeError,
        "unflatten: expected a TreeSpec, got %.200s; call unflatten(leaves, spec) with what "
        "flatten returned",
        Py_TYPE(spec_object)->tp_name);
    return nullptr;
  }
  // A tuple, which user code that runs meanwhile can't change.
  const py::object given = steal(PySequence_Tuple(leaves));
  if (!given) return nullptr;
  if (PyTuple_GET_SIZE(given.ptr()) != spec->num_leaves) {
    set_count_error(spec->num_leaves, PyTuple_GET_SIZE(given.ptr()));
    return nullptr;
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
    PyObject* made =
        build(node.kind, reinterpret_cast<PyTypeObject*>(node.type.ptr()), node.structure.ptr(),
              node.state.ptr(), stack.items.data() + stack.items.size() - size, node.size);
    if (made == nullptr) return nullptr;
    stack.pop(size);
    stack.push(made);
  }
  PyObject* root = stack.items.back();
  stack.items.pop_back();
  return root;
}

}  // namespace flex_model
