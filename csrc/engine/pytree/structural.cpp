// Containers that are flattened by their structure: subclasses of tuple, list and dict, named
// tuples, dataclasses, UserDicts, Hugging Face's outputs and caches.
//
// Their children are the items in the built-in storage, then the attributes that `describe` named.
// All other attributes are carried over unchanged. No __new__, __init__, __post_init__, __setattr__
// or __setitem__ of the class runs: the raw storage is copied, as by `copy.copy`.
//
// If a dict has an attribute with the name of a string key and the same object (ModelOutput,
// attribute dicts), the two stay synchronized: replacing the item replaces the attribute.
#include <algorithm>

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
py::object ordered_items(PyObject* dict, py::object* keys) {
  const py::object iterator = checked(PyODict_Type.tp_iter(dict));
  py::list key_list, values;
  while (const py::object key = steal(PyIter_Next(iterator.ptr()))) {
    PyObject* value = PyDict_GetItemWithError(dict, key.ptr());
    if (value == nullptr && !PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, key.ptr());
    throw_if(value == nullptr);
    values.append(py::handle(value));
    key_list.append(key);
  }
  throw_if(PyErr_Occurred());
  *keys = checked(PyList_AsTuple(key_list.ptr()));
  return std::move(values);
}

py::object open_storage(PyObject* object, Storage storage, py::object* keys) {
  switch (storage) {
    case Storage::kTuple: return checked(PyTuple_GetSlice(object, 0, PyTuple_GET_SIZE(object)));
    case Storage::kList: return checked(PyList_AsTuple(object));
    case Storage::kDict: return dict_items(object, keys);
    case Storage::kOrderedDict: return ordered_items(object, keys);
    case Storage::kStructSequence: {  // with the fields that are not shown as items
      const auto size = py::type::handle_of(object).attr("n_fields").cast<Py_ssize_t>();
      return make_tuple(reinterpret_cast<PyTupleObject*>(object)->ob_item, size);
    }
    default: return borrow(marks().no_arguments);
  }
}

// Whether the attribute of the key's name holds the same object as the item.
bool in_step(PyObject* attributes, PyObject* key, PyObject* item) {
  return PyUnicode_Check(key) && PyDict_GetItem(attributes, key) == item;
}

// Appends the values of the named attributes to `children`, and the names that are set to `names`.
void open_attributes(PyObject* object, const ContainerType& type, PyObject* attributes,
                     const py::object& keys, const py::object& items, py::list* names,
                     py::list* children) {
  py::object requested = type.attributes;
  if (!PyTuple_Check(requested.ptr())) {
    requested = checked(PyObject_CallOneArg(requested.ptr(), object));
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(requested.ptr()); ++i) {
    PyObject* name = PyTuple_GET_ITEM(requested.ptr(), i);
    PyObject* value = attributes == nullptr ? nullptr : PyDict_GetItemWithError(attributes, name);
    throw_if(value == nullptr && PyErr_Occurred());
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
    names->append(py::handle(name));
    children->append(alive);
  }
}

// Returns the attributes of the object with a hole in place of each child; None without attributes.
py::object template_of(PyObject* object, PyObject* attributes, const py::object& keys,
                       const py::object& items, const py::object& names) {
  if (attributes == object) return borrow(marks().hole);  // self.__dict__ = self
  if (attributes == nullptr || PyDict_GET_SIZE(attributes) == 0) return py::none();
  py::object copy = checked(PyDict_Copy(attributes));
  for (Py_ssize_t i = 0; keys && i < PyTuple_GET_SIZE(keys.ptr()); ++i) {
    PyObject* key = PyTuple_GET_ITEM(keys.ptr(), i);
    if (!in_step(copy.ptr(), key, PySequence_Fast_ITEMS(items.ptr())[i])) continue;
    throw_if(PyDict_SetItem(copy.ptr(), key, marks().hole) < 0);
  }
  for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names.ptr()); ++i) {
    PyObject* name = PyTuple_GET_ITEM(names.ptr(), i);
    const int has = PyDict_Contains(copy.ptr(), name);
    throw_if(has < 0 || (has && PyDict_SetItem(copy.ptr(), name, marks().hole) < 0));
  }
  return copy;
}

// Null if there is nothing to keep.
py::object state_of(PyObject* object, const ContainerType& type, PyObject* attributes,
                    const py::object& keys, const py::object& items, const py::object& names) {
  py::object kept = template_of(object, attributes, keys, items, names);
  if (kept.is_none() && type.slots.empty()) return {};
  py::object state = checked(PyTuple_New(1 + static_cast<Py_ssize_t>(type.slots.size())));
  PyTuple_SET_ITEM(state.ptr(), 0, kept.release().ptr());
  for (size_t i = 0; i < type.slots.size(); ++i) {
    PyObject* value = *slot_address(object, type.slots[i]);
    if (value == nullptr) value = marks().unset;
    const int is_child = names ? PySequence_Contains(names.ptr(), type.slots[i].name.ptr()) : 0;
    throw_if(is_child < 0);
    if (is_child) value = marks().hole;
    Py_INCREF(value);
    PyTuple_SET_ITEM(state.ptr(), i + 1, value);
  }
  return state;
}

py::object new_with_items(PyTypeObject* type, Storage storage, PyObject* keys,
                          PyObject* const* items, Py_ssize_t size) {
  PyObject* none = marks().no_arguments;
  switch (storage) {
    case Storage::kTuple: {
      const py::object arguments = py::make_tuple(make_tuple(items, size));
      return checked(PyTuple_Type.tp_new(type, arguments.ptr(), nullptr));
    }
    case Storage::kList: {
      const py::object list = make_list(items, size);
      py::object made = checked(PyList_Type.tp_new(type, none, nullptr));
      throw_if(PyList_SetSlice(made.ptr(), 0, 0, list.ptr()) < 0);
      return made;
    }
    case Storage::kDict:
    case Storage::kOrderedDict: {
      const bool ordered = storage == Storage::kOrderedDict;
      py::object made = checked((ordered ? PyODict_Type : PyDict_Type).tp_new(type, none, nullptr));
      for (Py_ssize_t i = 0; i < size; ++i) {
        PyObject* key = PyTuple_GET_ITEM(keys, i);
        throw_if((ordered ? PyODict_SetItem(made.ptr(), key, items[i])
                          : PyDict_SetItem(made.ptr(), key, items[i])) < 0);
      }
      return made;
    }
    case Storage::kStructSequence: {
      py::object made = checked(PyStructSequence_New(type));
      for (Py_ssize_t i = 0; i < size; ++i) {
        Py_INCREF(items[i]);
        PyStructSequence_SetItem(made.ptr(), i, items[i]);
      }
      return made;
    }
    default: return checked(PyBaseObject_Type.tp_new(type, none, nullptr));
  }
}

// Puts `value` where `name` has a hole in `attributes`; false if there is none.
bool fill_hole(PyObject* attributes, PyObject* name, PyObject* value) {
  if (!PyUnicode_Check(name) || PyDict_GetItem(attributes, name) != marks().hole) return false;
  throw_if(PyDict_SetItem(attributes, name, value) < 0);
  return true;
}

void set_slot(PyObject* object, const Slot& slot, PyObject* value) {
  Py_INCREF(value);
  Py_XSETREF(*slot_address(object, slot), value);
}

void restore_state(PyObject* made, const ContainerType& type, PyObject* keys, PyObject* names,
                   PyObject* state, PyObject* const* children, Py_ssize_t num_items) {
  py::object attributes = borrow(PyTuple_GET_ITEM(state, 0));
  if (attributes.ptr() == marks().hole) {
    throw_if(PyObject_GenericSetDict(made, made, nullptr) < 0);
    attributes = py::none();
  }
  const bool has_attributes = !attributes.is_none();
  if (has_attributes) {
    attributes = checked(PyDict_Copy(attributes.ptr()));
    for (Py_ssize_t i = 0; keys != nullptr && i < num_items; ++i) {
      fill_hole(attributes.ptr(), PyTuple_GET_ITEM(keys, i), children[i]);
    }
  }
  for (size_t i = 0; i < type.slots.size(); ++i) {
    PyObject* value = PyTuple_GET_ITEM(state, i + 1);
    if (value != marks().unset && value != marks().hole) set_slot(made, type.slots[i], value);
  }
  for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_GET_SIZE(names); ++i) {
    PyObject *name = PyTuple_GET_ITEM(names, i), *child = children[num_items + i];
    if (has_attributes && fill_hole(attributes.ptr(), name, child)) continue;
    const auto slot = std::find_if(type.slots.begin(), type.slots.end(), [&](const Slot& one) {
      return PyUnicode_Compare(one.name.ptr(), name) == 0;
    });
    if (slot != type.slots.end()) set_slot(made, *slot, child);
  }
  if (!has_attributes) return;
  // Another dict in its place would not be read: Python 3.13 has the values in the object itself.
  const py::object own = checked(PyObject_GenericGetDict(made, nullptr));
  throw_if(PyDict_Update(own.ptr(), attributes.ptr()) < 0);
}

}  // namespace

void open_structural(PyObject* object, const ContainerType& type, bool to_rebuild, Opened* opened) {
  py::object keys, names, attributes;
  const py::object items = open_storage(object, type.storage, &keys);
  if (type.has_dict && (to_rebuild || type.attributes)) {
    attributes = checked(PyObject_GenericGetDict(object, nullptr));
  }
  opened->children = items;
  if (type.attributes) {
    py::list name_list, children(items);
    open_attributes(object, type, attributes.ptr(), keys, items, &name_list, &children);
    names = checked(PyList_AsTuple(name_list.ptr()));
    opened->children = std::move(children);
  }
  if (!to_rebuild) return;
  if (keys || names) {
    PyObject* parts[] = {keys ? keys.ptr() : Py_None, names ? names.ptr() : Py_None};
    opened->structure = make_tuple(parts, 2);
  }
  opened->state = state_of(object, type, attributes.ptr(), keys, items, names);
}

py::object build_structural(PyTypeObject* type, PyObject* structure, PyObject* state,
                            PyObject* const* children, Py_ssize_t size) {
  const ContainerType& known = container_type(type);
  PyObject *keys = nullptr, *names = nullptr;
  if (structure != nullptr) {
    if (PyTuple_GET_ITEM(structure, 0) != Py_None) keys = PyTuple_GET_ITEM(structure, 0);
    if (PyTuple_GET_ITEM(structure, 1) != Py_None) names = PyTuple_GET_ITEM(structure, 1);
  }
  const Py_ssize_t num_items = size - (names == nullptr ? 0 : PyTuple_GET_SIZE(names));
  py::object made = new_with_items(type, known.storage, keys, children, num_items);
  if (state != nullptr) {
    restore_state(made.ptr(), known, keys, names, state, children, num_items);
  }
  return made;
}

}  // namespace flex_model
