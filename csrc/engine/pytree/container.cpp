#include "pytree/container.h"

namespace flex_model {
namespace {

void check_children(PyObject* object, PyObject* children, const char* source) {
  const bool iterable = Py_TYPE(children)->tp_iter != nullptr || PySequence_Check(children);
  const bool mistaken = PyType_IsSubtype(Py_TYPE(children), leaf_type) ||
                        PyUnicode_Check(children) || PyBytes_Check(children) ||
                        PyDict_Check(children);
  if (iterable && !mistaken) return;
  throw_error(PyExc_TypeError,
              "flatten: the function registered with %s for %.200s must return its children as a "
              "tuple or list, got %.200s; return (children, context)",
              source, Py_TYPE(object)->tp_name, Py_TYPE(children)->tp_name);
}

void open_registered(PyObject* object, const Classified& found, Opened* opened) {
  const char* source = found.is_torch ? "torch.utils._pytree" : "flex_model.pytree.register";
  const py::object result = checked(PyObject_CallOneArg(found.flatten.ptr(), object));
  const bool is_tuple = PyTuple_Check(result.ptr());
  if (!is_tuple || PyTuple_GET_SIZE(result.ptr()) != 2) {
    throw_error(PyExc_TypeError,
                "flatten: the function registered with %s for %.200s must return (children, "
                "context), got %s%.200s; return a tuple of these two",
                source, Py_TYPE(object)->tp_name, is_tuple ? "another number of items in a " : "",
                Py_TYPE(result.ptr())->tp_name);
  }
  PyObject* children = PyTuple_GET_ITEM(result.ptr(), 0);
  check_children(object, children, source);
  opened->children = checked(PySequence_Tuple(children));
  opened->structure = borrow(PyTuple_GET_ITEM(result.ptr(), 1));
  opened->state = found.unflatten;
}

py::object build_dict(PyObject* keys, PyObject* const* children, Py_ssize_t size) {
  py::object dict = checked(PyDict_New());
  for (Py_ssize_t i = 0; i < size; ++i) {
    throw_if(PyDict_SetItem(dict.ptr(), PyTuple_GET_ITEM(keys, i), children[i]) < 0);
  }
  return dict;
}

py::object build_registered(PyObject* context, PyObject* unflatten, PyObject* const* children,
                            Py_ssize_t size) {
  const py::object list = make_list(children, size);
  PyObject* arguments[] = {list.ptr(), context};
  return checked(PyObject_Vectorcall(unflatten, arguments, 2, nullptr));
}

}  // namespace

py::object make_tuple(PyObject* const* items, Py_ssize_t size) {
  py::object tuple = checked(PyTuple_New(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    Py_INCREF(items[i]);
    PyTuple_SET_ITEM(tuple.ptr(), i, items[i]);
  }
  return tuple;
}

py::object make_list(PyObject* const* items, Py_ssize_t size) {
  py::object list = checked(PyList_New(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    Py_INCREF(items[i]);
    PyList_SET_ITEM(list.ptr(), i, items[i]);
  }
  return list;
}

py::object dict_items(PyObject* dict, py::object* keys) {
  py::object values;
  Py_ssize_t size;
  do {  // an allocation may run the collector, whose finalizers may change the dict
    size = PyDict_GET_SIZE(dict);
    values = checked(PyTuple_New(size));
    if (keys != nullptr) *keys = checked(PyTuple_New(size));
  } while (size != PyDict_GET_SIZE(dict));
  PyObject *key, *value;
  Py_ssize_t i = 0;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value); ++i) {
    Py_INCREF(value);
    PyTuple_SET_ITEM(values.ptr(), i, value);
    if (keys == nullptr) continue;
    Py_INCREF(key);
    PyTuple_SET_ITEM(keys->ptr(), i, key);
  }
  return values;
}

Opened open(PyObject* object, bool to_rebuild) {
  Opened opened;
  if (classify_builtin(object, &opened.kind)) {
    switch (opened.kind) {
      case Kind::kTuple: opened.children = borrow(object); break;
      case Kind::kList: opened.children = checked(PyList_AsTuple(object)); break;
      case Kind::kDict:
        opened.children = dict_items(object, to_rebuild ? &opened.structure : nullptr);
        break;
      default: break;
    }
    return opened;
  }
  const Classified found = classify(object);
  opened.kind = found.kind;
  if (found.kind == Kind::kRegistered) open_registered(object, found, &opened);
  if (found.kind == Kind::kStructural) open_structural(object, *found.type, to_rebuild, &opened);
  return opened;
}

py::object build(Kind kind, PyTypeObject* type, PyObject* structure, PyObject* state,
                 PyObject* const* children, Py_ssize_t size) {
  switch (kind) {
    case Kind::kTuple: return make_tuple(children, size);
    case Kind::kList: return make_list(children, size);
    case Kind::kDict: return build_dict(structure, children, size);
    case Kind::kRegistered: return build_registered(structure, state, children, size);
    default: return build_structural(type, structure, state, children, size);
  }
}

Path::Path(PyObject* container, const Path* parent, const char* operation)
    : container(container), parent(parent), depth(parent == nullptr ? 1 : parent->depth + 1) {
  for (const Path* outer = parent; outer != nullptr; outer = outer->parent) {
    if (outer->container != container) continue;
    throw_error(PyExc_ValueError,
                "%s: a %.200s contains itself; expected a tree without cycles, return a copy of "
                "what is shared",
                operation, Py_TYPE(container)->tp_name);
  }
  if (depth <= kMaxDepth) return;
  throw_error(PyExc_RecursionError,
              "%s: containers are nested deeper than %d, the innermost is a %.200s; return a "
              "flatter structure",
              operation, kMaxDepth, Py_TYPE(container)->tp_name);
}

}  // namespace flex_model
