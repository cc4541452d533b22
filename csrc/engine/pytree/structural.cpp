// Containers that are flattened by their structure: subclasses of tuple, list and dict, named
// tuples, dataclasses, UserDicts, Hugging Face's outputs and caches.
//
// Their children are the items in the built-in storage, then the attributes that `describe` named.
// All other attributes are carried over unchanged. No __new__, __init__, __post_init__, __setattr__
// or __setitem__ of the class runs: the raw storage is copied, as by `copy.copy`.
//
// If a dict has an attribute with the name of a string key and the same object (ModelOutput,
// attribute dicts), the two stay synchronized: replacing the item replaces the attribute.
#include "pytree/container.h"

namespace flex_model {
namespace {

// Placeholders in `state`. `hole`: the new value is among the children. `unset`: a slot without
// value.
struct Marks {
  PyObject* hole = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
  PyObject* unset = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
  PyObject* no_arguments = PyTuple_New(0);
};

const Marks& marks() {
  static const Marks* marks = new Marks();
  return *marks;
}

PyObject** slot_address(PyObject* object, const Slot& slot) {
  return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + slot.offset);
}

// Borrowed; nullptr without an error if there is no such slot or it is empty.
PyObject* slot_value(PyObject* object, const ContainerType& type, PyObject* name) {
  for (const Slot& slot : type.slots) {
    if (slot.name.ptr() == name || PyUnicode_Compare(slot.name.ptr(), name) == 0) {
      return *slot_address(object, slot);
    }
  }
  return nullptr;
}

// The order of an OrderedDict is its own, not that of the dict below.
bool ordered_items(PyObject* dict, py::object* keys, py::object* values) {
  const py::object iterator = steal(PyODict_Type.tp_iter(dict));
  py::object key_list = steal(PyList_New(0)), value_list = steal(PyList_New(0));
  if (!iterator || !key_list || !value_list) return false;
  while (const py::object key = steal(PyIter_Next(iterator.ptr()))) {
    const py::object value = borrow(PyDict_GetItemWithError(dict, key.ptr()));
    if (!value) {
      if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, key.ptr());
      return false;
    }
    if (PyList_Append(key_list.ptr(), key.ptr()) < 0) return false;
    if (PyList_Append(value_list.ptr(), value.ptr()) < 0) return false;
  }
  if (PyErr_Occurred()) return false;
  *keys = steal(PyList_AsTuple(key_list.ptr()));
  *values = std::move(value_list);
  return static_cast<bool>(*keys);
}

bool open_storage(PyObject* object, Storage storage, py::object* keys, py::object* items) {
  switch (storage) {
    case Storage::kTuple:
      *items = steal(PyTuple_GetSlice(object, 0, PyTuple_GET_SIZE(object)));
      return static_cast<bool>(*items);
    case Storage::kList: *items = steal(PyList_AsTuple(object)); return static_cast<bool>(*items);
    case Storage::kDict: return dict_items(object, keys, items);
    case Storage::kOrderedDict: return ordered_items(object, keys, items);
    case Storage::kStructSequence: {  // with the fields that are not shown as items
      const py::object count =
          steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "n_fields"));
      const Py_ssize_t size = count ? PyLong_AsSsize_t(count.ptr()) : -1;
      if (size < 0) return false;
      *items = make_tuple(reinterpret_cast<PyTupleObject*>(object)->ob_item, size);
      return static_cast<bool>(*items);
    }
    case Storage::kNone: *items = borrow(marks().no_arguments); return true;
  }
  return false;
}

// Whether the attribute of the key's name holds the same object as the item.
bool in_step(PyObject* attributes, PyObject* key, PyObject* item) {
  return PyUnicode_Check(key) && PyDict_GetItem(attributes, key) == item;
}

// Appends the values of the named attributes to `children`, and the names that are set to `names`.
bool open_attributes(PyObject* object, const ContainerType& type, PyObject* attributes,
                     const py::object& keys, const py::object& items, PyObject* names,
                     PyObject* children) {
  py::object requested = type.attributes;
  if (!PyTuple_Check(requested.ptr())) {
    requested = steal(PyObject_CallOneArg(requested.ptr(), object));
    if (!requested) return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(requested.ptr()); ++i) {
    PyObject* name = PyTuple_GET_ITEM(requested.ptr(), i);
    PyObject* value = attributes == nullptr ? nullptr : PyDict_GetItemWithError(attributes, name);
    if (value == nullptr && PyErr_Occurred()) return false;
    if (value == nullptr) value = slot_value(object, type, name);
    if (value == nullptr) continue;
    bool is_item = false;  // whether its item is a child already
    for (Py_ssize_t k = 0; keys && attributes != nullptr && k < PyTuple_GET_SIZE(keys.ptr()); ++k) {
      PyObject* key = PyTuple_GET_ITEM(keys.ptr(), k);
      is_item |= PySequence_Fast_ITEMS(items.ptr())[k] == value && PyUnicode_Check(key) &&
                 PyUnicode_Compare(key, name) == 0;
    }
    if (is_item) continue;
    const py::object alive = borrow(value);
    if (PyList_Append(names, name) < 0 || PyList_Append(children, value) < 0) return false;
  }
  return true;
}

// Returns the attributes of the object with a hole in place of each child; None without attributes.
py::object template_of(PyObject* object, PyObject* attributes, const py::object& keys,
                       const py::object& items, const py::object& names) {
  if (attributes == object) return borrow(marks().hole);  // self.__dict__ = self
  if (attributes == nullptr || PyDict_GET_SIZE(attributes) == 0) return py::none();
  py::object copy = steal(PyDict_Copy(attributes));
  if (!copy) return copy;
  for (Py_ssize_t i = 0; keys && i < PyTuple_GET_SIZE(keys.ptr()); ++i) {
    PyObject* key = PyTuple_GET_ITEM(keys.ptr(), i);
    if (!in_step(copy.ptr(), key, PySequence_Fast_ITEMS(items.ptr())[i])) continue;
    if (PyDict_SetItem(copy.ptr(), key, marks().hole) < 0) return py::object();
  }
  for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names.ptr()); ++i) {
    PyObject* name = PyTuple_GET_ITEM(names.ptr(), i);
    const int has = PyDict_Contains(copy.ptr(), name);
    if (has < 0 || (has && PyDict_SetItem(copy.ptr(), name, marks().hole) < 0)) return py::object();
  }
  return copy;
}

bool fill_state(PyObject* object, const ContainerType& type, PyObject* attributes,
                const py::object& keys, const py::object& items, const py::object& names,
                Opened* opened) {
  py::object kept = template_of(object, attributes, keys, items, names);
  if (!kept) return false;
  if (kept.is_none() && type.slots.empty()) return true;
  opened->state = steal(PyTuple_New(1 + static_cast<Py_ssize_t>(type.slots.size())));
  if (!opened->state) return false;
  PyTuple_SET_ITEM(opened->state.ptr(), 0, kept.release().ptr());
  for (size_t i = 0; i < type.slots.size(); ++i) {
    PyObject* value = *slot_address(object, type.slots[i]);
    if (value == nullptr) value = marks().unset;
    const int is_child = names ? PySequence_Contains(names.ptr(), type.slots[i].name.ptr()) : 0;
    if (is_child < 0) return false;
    if (is_child) value = marks().hole;
    Py_INCREF(value);
    PyTuple_SET_ITEM(opened->state.ptr(), i + 1, value);
  }
  return true;
}

py::object new_with_items(PyTypeObject* type, Storage storage, PyObject* keys,
                          PyObject* const* items, Py_ssize_t size) {
  PyObject* none = marks().no_arguments;
  switch (storage) {
    case Storage::kTuple: {
      const py::object tuple = make_tuple(items, size);
      if (!tuple) return tuple;
      PyObject* argument = tuple.ptr();
      const py::object arguments = make_tuple(&argument, 1);
      return arguments ? steal(PyTuple_Type.tp_new(type, arguments.ptr(), nullptr)) : arguments;
    }
    case Storage::kList: {
      const py::object list = make_list(items, size);
      py::object made = list ? steal(PyList_Type.tp_new(type, none, nullptr)) : py::object();
      if (made && PyList_SetSlice(made.ptr(), 0, 0, list.ptr()) < 0) return py::object();
      return made;
    }
    case Storage::kDict:
    case Storage::kOrderedDict: {
      const bool ordered = storage == Storage::kOrderedDict;
      py::object made = steal((ordered ? PyODict_Type : PyDict_Type).tp_new(type, none, nullptr));
      for (Py_ssize_t i = 0; made && i < size; ++i) {
        PyObject* key = PyTuple_GET_ITEM(keys, i);
        const int failed = ordered ? PyODict_SetItem(made.ptr(), key, items[i])
                                   : PyDict_SetItem(made.ptr(), key, items[i]);
        if (failed) return py::object();
      }
      return made;
    }
    case Storage::kStructSequence: {
      py::object made = steal(PyStructSequence_New(type));
      for (Py_ssize_t i = 0; made && i < size; ++i) {
        Py_INCREF(items[i]);
        PyStructSequence_SetItem(made.ptr(), i, items[i]);
      }
      return made;
    }
    case Storage::kNone: return steal(PyBaseObject_Type.tp_new(type, none, nullptr));
  }
  return py::object();
}

// Puts `value` where `name` has a hole in `attributes`: 1 if there was one, 0, or -1 with an error.
int fill_hole(PyObject* attributes, PyObject* name, PyObject* value) {
  if (!PyUnicode_Check(name) || PyDict_GetItem(attributes, name) != marks().hole) return 0;
  return PyDict_SetItem(attributes, name, value) < 0 ? -1 : 1;
}

bool restore_state(PyObject* made, const ContainerType& type, PyObject* keys, PyObject* names,
                   PyObject* state, PyObject* const* children, Py_ssize_t num_items) {
  py::object attributes = borrow(PyTuple_GET_ITEM(state, 0));
  if (attributes.ptr() == marks().hole) {
    if (PyObject_GenericSetDict(made, made, nullptr) < 0) return false;
    attributes = py::none();
  }
  const bool has_attributes = !attributes.is_none();
  if (has_attributes) {
    attributes = steal(PyDict_Copy(attributes.ptr()));
    if (!attributes) return false;
    for (Py_ssize_t i = 0; keys != nullptr && i < num_items; ++i) {
      if (fill_hole(attributes.ptr(), PyTuple_GET_ITEM(keys, i), children[i]) < 0) return false;
    }
  }
  for (size_t i = 0; i < type.slots.size(); ++i) {
    PyObject* value = PyTuple_GET_ITEM(state, i + 1);
    if (value == marks().unset || value == marks().hole) continue;
    Py_INCREF(value);
    Py_XSETREF(*slot_address(made, type.slots[i]), value);
  }
  for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_GET_SIZE(names); ++i) {
    PyObject *name = PyTuple_GET_ITEM(names, i), *child = children[num_items + i];
    const int filled = has_attributes ? fill_hole(attributes.ptr(), name, child) : 0;
    if (filled < 0) return false;
    for (size_t s = 0; !filled && s < type.slots.size(); ++s) {
      if (PyUnicode_Compare(type.slots[s].name.ptr(), name) != 0) continue;
      Py_INCREF(child);
      Py_XSETREF(*slot_address(made, type.slots[s]), child);
      break;
    }
  }
  return !has_attributes || PyObject_GenericSetDict(made, attributes.ptr(), nullptr) == 0;
}

}  // namespace

bool open_structural(PyObject* object, const ContainerType& type, bool to_rebuild, Opened* opened) {
  py::object keys, names, attributes;
  if (!open_storage(object, type.storage, &keys, &opened->children)) return false;
  if (type.has_dict && (to_rebuild || type.attributes)) {
    attributes = steal(PyObject_GenericGetDict(object, nullptr));
    if (!attributes) return false;
  }
  const py::object items = opened->children;
  if (type.attributes) {
    py::object name_list = steal(PyList_New(0)), children = steal(PySequence_List(items.ptr()));
    if (!name_list || !children ||
        !open_attributes(object, type, attributes.ptr(), keys, items, name_list.ptr(),
                         children.ptr())) {
      return false;
    }
    names = steal(PyList_AsTuple(name_list.ptr()));
    if (!names) return false;
    opened->children = std::move(children);
  }
  if (!to_rebuild) return true;
  if (keys || names) {
    PyObject* parts[] = {keys ? keys.ptr() : Py_None, names ? names.ptr() : Py_None};
    opened->structure = make_tuple(parts, 2);
    if (!opened->structure) return false;
  }
  return fill_state(object, type, attributes.ptr(), keys, items, names, opened);
}

PyObject* build_structural(PyTypeObject* type, PyObject* structure, PyObject* state,
                           PyObject* const* children, Py_ssize_t size) {
  const ContainerType* known = container_type(type);
  if (known == nullptr) return nullptr;
  PyObject *keys = nullptr, *names = nullptr;
  if (structure != nullptr) {
    if (PyTuple_GET_ITEM(structure, 0) != Py_None) keys = PyTuple_GET_ITEM(structure, 0);
    if (PyTuple_GET_ITEM(structure, 1) != Py_None) names = PyTuple_GET_ITEM(structure, 1);
  }
  const Py_ssize_t num_items = size - (names == nullptr ? 0 : PyTuple_GET_SIZE(names));
  py::object made = new_with_items(type, known->storage, keys, children, num_items);
  if (!made) return nullptr;
  if (state != nullptr &&
      !restore_state(made.ptr(), *known, keys, names, state, children, num_items)) {
    return nullptr;
  }
  return made.release().ptr();
}

}  // namespace flex_model
