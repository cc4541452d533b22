#include "pytree/registry.h"

#include <structmember.h>

#include <memory>
#include <string>
#include <unordered_map>

namespace flex_model {

PyTypeObject* leaf_type = nullptr;

namespace {

// Never destroyed: the interpreter is gone before static destructors run.
struct Registry {
  std::unordered_map<PyTypeObject*, std::unique_ptr<ContainerType>> types;
  py::object describe;
  py::object torch_registry;
  PyObject* flatten_fn = PyUnicode_InternFromString("flatten_fn");
  PyObject* unflatten_fn = PyUnicode_InternFromString("unflatten_fn");
  PyTypeObject* defaultdict = import_type("defaultdict");
  // The deallocator that `class` statements set: a type without it has C state that can't be
  // copied.
  destructor class_dealloc = import_type("UserDict")->tp_dealloc;

  static PyTypeObject* import_type(const char* name) {
    return reinterpret_cast<PyTypeObject*>(
        py::object(py::module_::import("collections").attr(name)).release().ptr());
  }
};

Registry& registry() {
  static Registry* registry = new Registry();
  return *registry;
}

void forget(PyTypeObject* dead) {
  const auto found = registry().types.find(dead);
  if (found == registry().types.end()) return;
  const auto entry = std::move(found->second);
  registry().types.erase(found);  // before the entry dies: that may run any code
}

void add_slot(PyObject* descriptor, std::vector<Slot>* slots) {
  const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member;
  if (member->type != T_OBJECT_EX && member->type != T_OBJECT) return;
  slots->push_back({steal(PyUnicode_InternFromString(member->name)), member->offset});
}

bool is_struct_sequence(PyTypeObject* type) {
  return type->tp_base == &PyTuple_Type && type->tp_dealloc != registry().class_dealloc &&
         type->tp_dict != nullptr && PyDict_GetItemString(type->tp_dict, "n_sequence_fields") &&
         PyDict_GetItemString(type->tp_dict, "n_unnamed_fields");
}

// Follows the chain of base layouts to a built-in type that we can make and fill. False if a class
// with other C state is in the chain.
bool find_storage(PyTypeObject* type, ContainerType* entry) {
  if (is_struct_sequence(type)) return entry->storage = Storage::kStructSequence, true;
  for (; type->tp_dealloc == registry().class_dealloc; type = type->tp_base) {
    PyObject *name, *value;
    for (Py_ssize_t at = 0; PyDict_Next(type->tp_dict, &at, &name, &value);) {
      if (Py_TYPE(value) == &PyMemberDescr_Type) add_slot(value, &entry->slots);
    }
  }
  if (type == registry().defaultdict) {
    add_slot(PyDict_GetItemString(type->tp_dict, "default_factory"), &entry->slots);
    type = &PyDict_Type;
  }
  if (type == &PyTuple_Type) entry->storage = Storage::kTuple;
  if (type == &PyList_Type) entry->storage = Storage::kList;
  if (type == &PyDict_Type) entry->storage = Storage::kDict;
  if (type == &PyODict_Type) entry->storage = Storage::kOrderedDict;
  return entry->storage != Storage::kNone || type == &PyBaseObject_Type;
}

void describe(PyTypeObject* type, ContainerType* entry) {
  const py::object described =
      checked(PyObject_CallOneArg(registry().describe.ptr(), reinterpret_cast<PyObject*>(type)));
  if (!described.is_none()) {
    PyObject* attributes = PyTuple_GET_ITEM(described.ptr(), 0);
    if (attributes != Py_None) entry->attributes = borrow(attributes);
    entry->is_before_torch = PyTuple_GET_ITEM(described.ptr(), 1) == Py_True;
  }
  entry->has_dict = type->tp_dictoffset != 0;
  entry->is_structural =
      find_storage(type, entry) && (entry->storage != Storage::kNone || entry->attributes);
}

ContainerType& entry_of(const py::type& type) {
  require_leaf_type();
  return container_type(reinterpret_cast<PyTypeObject*>(type.ptr()));
}

std::string name_of(const py::type& type) {
  return reinterpret_cast<PyTypeObject*>(type.ptr())->tp_name;
}

void check_unregistered(const py::type& type, bool is_registered) {
  if (!is_registered) return;
  throw py::value_error("register: " + name_of(type) +
                        " is already registered; call flex_model.pytree.unregister first");
}

}  // namespace

ContainerType& container_type(PyTypeObject* type) {
  auto& types = registry().types;
  const auto found = types.find(type);
  if (found != types.end()) return *found->second;

  auto entry = std::make_unique<ContainerType>();
  describe(type, entry.get());
  const py::handle object(reinterpret_cast<PyObject*>(type));
  entry->weakref = py::weakref(object, py::cpp_function([type](const py::handle&) {
                                 forget(type);
                               }));  // keeps no type alive
  return *types.try_emplace(type, std::move(entry)).first->second;
}

Classified classify(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  if (PyType_IsSubtype(type, leaf_type)) return {Kind::kLeaf};
  const ContainerType& entry = container_type(type);
  if (entry.is_leaf) return {Kind::kLeaf};
  if (entry.flatten) return {Kind::kRegistered, &entry, entry.flatten, entry.unflatten};
  if (!entry.is_before_torch) {
    PyObject* node =
        PyDict_GetItemWithError(registry().torch_registry.ptr(), reinterpret_cast<PyObject*>(type));
    throw_if(node == nullptr && PyErr_Occurred());
    if (node != nullptr) {
      const py::object alive = borrow(node);
      return {Kind::kRegistered, &entry, checked(PyObject_GetAttr(node, registry().flatten_fn)),
              checked(PyObject_GetAttr(node, registry().unflatten_fn)), /*is_torch=*/true};
    }
  }
  return {entry.is_structural ? Kind::kStructural : Kind::kConstant, &entry};
}

void set_leaf_type(py::type type) {  // never freed, so leaf_type cannot dangle
  leaf_type = reinterpret_cast<PyTypeObject*>(type.release().ptr());
}

void set_type_sources(py::function describe, py::dict torch_registry) {
  registry().describe = std::move(describe);
  registry().torch_registry = std::move(torch_registry);
}

void register_container(py::type type, py::function flatten, py::function unflatten) {
  ContainerType& entry = entry_of(type);
  check_unregistered(type, entry.flatten || entry.is_leaf);
  entry.flatten = std::move(flatten);
  entry.unflatten = std::move(unflatten);
}

void unregister_container(py::type type) {
  ContainerType& entry = entry_of(type);
  if (!entry.flatten && !entry.is_leaf) {
    throw py::value_error(
        "unregister: " + name_of(type) +
        " is not registered; expected a type given to flex_model.pytree.register");
  }
  entry.is_leaf = false;
  const py::object flatten = std::move(entry.flatten), unflatten = std::move(entry.unflatten);
}

void register_leaf(py::type type) {
  ContainerType& entry = entry_of(type);
  check_unregistered(type, static_cast<bool>(entry.flatten));
  entry.is_leaf = true;
}

size_t num_known_types() { return registry().types.size(); }

}  // namespace flex_model
