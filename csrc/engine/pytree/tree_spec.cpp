#include "pytree/tree_spec.h"

#include <structmember.h>

#include <new>
#include <string>

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

// Whether two constants are equal: 1, 0, or -1 with a Python error. Compares identity first, since
// constants may be any objects (arrays, NaN), and types, so that 1, 1.0 and True differ.
int equal(PyObject* left, PyObject* right) {
  if (left == right) return 1;
  if (left == nullptr || right == nullptr || Py_TYPE(left) != Py_TYPE(right)) return 0;
  return PyObject_RichCompareBool(left, right, Py_EQ);
}

PyObject* compare(PyObject* left, PyObject* right, int operation) {
  const TreeSpec *a = as_tree_spec(left), *b = as_tree_spec(right);
  if (b == nullptr || (operation != Py_EQ && operation != Py_NE)) Py_RETURN_NOTIMPLEMENTED;
  bool same = a->num_leaves == b->num_leaves && a->nodes.size() == b->nodes.size();
  for (size_t i = 0; same && i < a->nodes.size(); ++i) {
    const Node &x = a->nodes[i], &y = b->nodes[i];
    same = x.kind == y.kind && x.size == y.size && x.type.ptr() == y.type.ptr();
    if (!same) break;
    const int structure = equal(x.structure.ptr(), y.structure.ptr());
    if (structure < 0) return nullptr;
    same = structure != 0;
  }
  return PyBool_FromLong(same == (operation == Py_EQ));
}

// Appends repr(object); false with a Python error.
bool append_repr(PyObject* object, std::string* text) {
  const py::object repr = steal(PyObject_Repr(object));
  const char* utf8 = repr ? PyUnicode_AsUTF8(repr.ptr()) : nullptr;
  if (utf8 == nullptr) return false;
  *text += utf8;
  return true;
}

// Appends the children's texts with their keys or names in front, separated by commas.
bool append_children(const Node& node, const std::string* children, std::string* text) {
  PyObject *keys = nullptr, *names = nullptr;
  if (node.kind == Kind::kDict) keys = node.structure.ptr();
  if (node.kind == Kind::kStructural && node.structure) {
    keys = PyTuple_GET_ITEM(node.structure.ptr(), 0);
    names = PyTuple_GET_ITEM(node.structure.ptr(), 1);
  }
  const bool has_keys = keys != nullptr && keys != Py_None;
  const Py_ssize_t num_names = names != nullptr && names != Py_None ? PyTuple_GET_SIZE(names) : 0;
  for (Py_ssize_t i = 0; i < node.size; ++i) {
    if (i > 0) *text += ", ";
    const Py_ssize_t name = i - (node.size - num_names);
    if (name >= 0) {
      const char* utf8 = PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, name));
      if (utf8 == nullptr) return false;
      *text += std::string(utf8) + "=";
    } else if (has_keys) {
      if (!append_repr(PyTuple_GET_ITEM(keys, i), text)) return false;
      *text += ": ";
    }
    *text += children[i];
  }
  return true;
}

bool append_node(const Node& node, const std::string* children, std::string* text) {
  switch (node.kind) {
    case Kind::kLeaf: *text += "*"; return true;
    case Kind::kConstant: return append_repr(node.structure.ptr(), text);
    case Kind::kTuple:
      *text += "(";
      append_children(node, children, text);
      *text += node.size == 1 ? ",)" : ")";
      return true;
    case Kind::kList:
      *text += "[";
      append_children(node, children, text);
      *text += "]";
      return true;
    case Kind::kDict:
      *text += "{";
      if (!append_children(node, children, text)) return false;
      *text += "}";
      return true;
    default: {
      const std::string name = reinterpret_cast<PyTypeObject*>(node.type.ptr())->tp_name;
      *text += name.substr(name.rfind('.') + 1) + "(";
      if (!append_children(node, children, text)) return false;
      *text += ")";
      return true;
    }
  }
}

PyObject* repr(PyObject* self) {
  const int entered = Py_ReprEnter(self);  // a constant may hold the spec
  if (entered != 0) return entered > 0 ? PyUnicode_FromString("TreeSpec(...)") : nullptr;
  std::vector<std::string> stack;
  bool failed = false;
  for (const Node& node : cast(self)->nodes) {
    const size_t first = stack.size() - static_cast<size_t>(node.size);
    std::string text;
    failed = !append_node(node, stack.data() + first, &text);
    if (failed) break;
    stack.resize(first);
    stack.push_back(std::move(text));
  }
  Py_ReprLeave(self);
  if (failed) return nullptr;
  const std::string text = "TreeSpec(" + (stack.empty() ? std::string() : stack.back()) + ")";
  return PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
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

PyObject* tree_spec_type() {
  if (type_object == nullptr) {
    type_object = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&type_spec));
  }
  return reinterpret_cast<PyObject*>(type_object);
}

const TreeSpec* as_tree_spec(PyObject* object) {
  return Py_TYPE(object) == type_object ? cast(object) : nullptr;
}

PyObject* make_tree_spec(std::vector<Node> nodes, Py_ssize_t num_leaves) {
  TreeSpec* spec = PyObject_GC_New(TreeSpec, type_object);
  if (spec == nullptr) return nullptr;
  spec->num_leaves = num_leaves;
  new (&spec->nodes) std::vector<Node>(std::move(nodes));
  PyObject_GC_Track(reinterpret_cast<PyObject*>(spec));
  return reinterpret_cast<PyObject*>(spec);
}

}  // namespace flex_model
