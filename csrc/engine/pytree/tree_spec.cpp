#include "pytree/tree_spec.h"

#include <structmember.h>

#include <algorithm>
#include <new>
#include <string_view>

namespace flex_model {
namespace {

constexpr char kDoc[] =
    "A tree without its leaves: the containers, keys and constants, as :func:`flatten` found "
    "them.\n\n"
    "Two specs are equal when they have the same containers by type, with the same keys, contexts\n"
    "and equal constants in the same places. Attributes that are merely carried over (of a list\n"
    "subclass, say) are not compared. A spec is not hashable: its constants need not be.\n\n"
    "Example::\n\n"
    "    leaves, spec = pytree.flatten({\"a\": tensor, \"b\": [tensor, 3]})\n"
    "    spec             # TreeSpec({'a': *, 'b': [*, 3]})\n"
    "    spec.num_leaves  # 2\n";

TreeSpec* cast(PyObject* object) { return reinterpret_cast<TreeSpec*>(object); }

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  for (const Node& node : cast(self)->nodes) {
    Py_VISIT(node.type.ptr());
    Py_VISIT(node.structure.ptr());
    Py_VISIT(node.state.ptr());
  }
  return 0;
}

int clear(PyObject* self) {
  const std::vector<Node> nodes = std::move(cast(self)->nodes);
  return 0;
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  cast(self)->nodes.~vector();
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

// Compares identity first, since constants may be any objects (arrays, NaN), and types, so that 1,
// 1.0 and True differ.
bool are_equal(PyObject* left, PyObject* right) {
  if (left == right) return true;
  if (left == nullptr || right == nullptr || Py_TYPE(left) != Py_TYPE(right)) return false;
  const int equal = PyObject_RichCompareBool(left, right, Py_EQ);
  throw_if(equal < 0);
  return equal != 0;
}

PyObject* compare(PyObject* left, PyObject* right, int operation) {
  const TreeSpec *a = as_tree_spec(left), *b = as_tree_spec(right);
  if (b == nullptr || (operation != Py_EQ && operation != Py_NE)) Py_RETURN_NOTIMPLEMENTED;
  const auto is_like = [](const Node& x, const Node& y) {
    return x.kind == y.kind && x.size == y.size && x.type.ptr() == y.type.ptr() &&
           are_equal(x.structure.ptr(), y.structure.ptr());
  };
  return guarded([&] {
    const bool same =
        a->num_leaves == b->num_leaves &&
        std::equal(a->nodes.begin(), a->nodes.end(), b->nodes.begin(), b->nodes.end(), is_like);
    return py::bool_(same == (operation == Py_EQ));
  });
}

// `children` are the texts of the node's children.
py::object text_of(const Node& node, const py::object* children) {
  if (node.kind == Kind::kLeaf) return py::str("*");
  if (node.kind == Kind::kConstant) return py::repr(node.structure);
  PyObject *keys = Py_None, *names = Py_None;
  if (node.kind == Kind::kDict) keys = node.structure.ptr();
  if (node.kind == Kind::kStructural && node.structure) {
    keys = PyTuple_GET_ITEM(node.structure.ptr(), 0);
    names = PyTuple_GET_ITEM(node.structure.ptr(), 1);
  }
  const Py_ssize_t num_items = node.size - (names == Py_None ? 0 : PyTuple_GET_SIZE(names));
  py::list parts;
  for (Py_ssize_t i = 0; i < node.size; ++i) {
    PyObject* child = children[i].ptr();
    if (i >= num_items) {
      PyObject* name = PyTuple_GET_ITEM(names, i - num_items);
      parts.append(checked(PyUnicode_FromFormat("%U=%U", name, child)));
    } else if (keys != Py_None) {
      parts.append(checked(PyUnicode_FromFormat("%R: %U", PyTuple_GET_ITEM(keys, i), child)));
    } else {
      parts.append(children[i]);
    }
  }
  const py::object joined = checked(PyUnicode_Join(py::str(", ").ptr(), parts.ptr()));
  switch (node.kind) {
    case Kind::kTuple:
      return checked(PyUnicode_FromFormat(node.size == 1 ? "(%U,)" : "(%U)", joined.ptr()));
    case Kind::kList: return checked(PyUnicode_FromFormat("[%U]", joined.ptr()));
    case Kind::kDict: return checked(PyUnicode_FromFormat("{%U}", joined.ptr()));
    default: {
      const std::string_view name = reinterpret_cast<PyTypeObject*>(node.type.ptr())->tp_name;
      const char* without_module = name.data() + name.rfind('.') + 1;
      return checked(PyUnicode_FromFormat("%s(%U)", without_module, joined.ptr()));
    }
  }
}

PyObject* repr(PyObject* self) {
  const int entered = Py_ReprEnter(self);  // a constant may hold the spec
  if (entered != 0) return entered > 0 ? PyUnicode_FromString("TreeSpec(...)") : nullptr;
  PyObject* text = guarded([&] {
    std::vector<py::object> stack;
    for (const Node& node : cast(self)->nodes) {
      const size_t first = stack.size() - static_cast<size_t>(node.size);
      py::object text = text_of(node, stack.data() + first);
      stack.resize(first);
      stack.push_back(std::move(text));
    }
    // A spec that the garbage collector has cleared has no nodes.
    const py::object root = stack.empty() ? py::str() : stack.back();
    return checked(PyUnicode_FromFormat("TreeSpec(%U)", root.ptr()));
  });
  Py_ReprLeave(self);
  return text;
}

PyObject* get_num_leaves(PyObject* self, void*) {
  return PyLong_FromSsize_t(cast(self)->num_leaves);
}

PyGetSetDef getters[] = {
    {"num_leaves", get_num_leaves, nullptr, "The number of leaves of the tree.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

template <typename Function>
void* slot(Function* function) {
  return reinterpret_cast<void*>(function);
}

PyType_Slot type_slots[] = {{Py_tp_doc, const_cast<char*>(kDoc)},
                            {Py_tp_dealloc, slot(dealloc)},
                            {Py_tp_traverse, slot(traverse)},
                            {Py_tp_clear, slot(clear)},
                            {Py_tp_richcompare, slot(compare)},
                            {Py_tp_hash, slot(PyObject_HashNotImplemented)},
                            {Py_tp_repr, slot(repr)},
                            {Py_tp_getset, getters},
                            {0, nullptr}};

PyType_Spec type_spec = {
    "flex_model.pytree.TreeSpec", sizeof(TreeSpec), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, type_slots};

PyTypeObject* type_object = nullptr;

}  // namespace

py::object tree_spec_type() {
  if (type_object == nullptr) {
    type_object =
        reinterpret_cast<PyTypeObject*>(checked(PyType_FromSpec(&type_spec)).release().ptr());
  }
  return borrow(reinterpret_cast<PyObject*>(type_object));
}

const TreeSpec* as_tree_spec(PyObject* object) {
  return Py_TYPE(object) == type_object ? cast(object) : nullptr;
}

py::object make_tree_spec(std::vector<Node> nodes, Py_ssize_t num_leaves) {
  TreeSpec* spec = PyObject_GC_New(TreeSpec, type_object);
  throw_if(spec == nullptr);
  spec->num_leaves = num_leaves;
  new (&spec->nodes) std::vector<Node>(std::move(nodes));
  PyObject_GC_Track(reinterpret_cast<PyObject*>(spec));
  return steal(reinterpret_cast<PyObject*>(spec));
}

}  // namespace flex_model
