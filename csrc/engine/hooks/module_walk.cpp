#include "module_walk.h"

#include <cstring>
#include <unordered_set>
#include <vector>

#include "module_state.h"

namespace flex_model {
namespace {

constexpr char kOwnModules[] = "flex_model.";

// Interned, so that dicts and types find them by identity; they live as long as the process.
struct Names {
  PyObject* dict = PyUnicode_InternFromString("__dict__");
  PyObject* module = PyUnicode_InternFromString("__module__");
  PyObject* forward = PyUnicode_InternFromString("forward");
  PyObject* training = PyUnicode_InternFromString("training");
  PyObject* modules = PyUnicode_InternFromString("_modules");
  PyObject* parameters = PyUnicode_InternFromString("_parameters");
  PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
  PyObject* hooks[4] = {PyUnicode_InternFromString("_forward_pre_hooks"),
                        PyUnicode_InternFromString("_forward_hooks"),
                        PyUnicode_InternFromString("_backward_pre_hooks"),
                        PyUnicode_InternFromString("_backward_hooks")};
};

const Names& names() {
  static const Names kNames;
  return kNames;
}

class Walk {
 public:
  Walk(PyObject* tensor_type, PyObject* module_type) : state_(tensor_type, module_type) {}

  void visit(PyObject* root) {
    waiting_.push_back(root);
    while (!waiting_.empty()) {
      PyObject* module = waiting_.back();
      waiting_.pop_back();
      if (seen_.insert(module).second) visit_one(module);
    }
  }

  bool is(const py::list& before) const {
    if (static_cast<size_t>(PyList_GET_SIZE(before.ptr())) != found_.size()) return false;
    for (size_t i = 0; i < found_.size(); ++i) {
      if (PyList_GET_ITEM(before.ptr(), static_cast<Py_ssize_t>(i)) != found_[i].ptr()) {
        return false;
      }
    }
    return true;
  }

  py::list objects() const {
    py::list list(found_.size());
    for (size_t i = 0; i < found_.size(); ++i) list[i] = found_[i];
    return list;
  }

  uint64_t flags() const { return flags_; }
  uint64_t state() const { return state_.value(); }

 private:
  void visit_one(PyObject* module) {
    const py::object own = attribute(module, names().dict);
    if (!own || !PyDict_Check(own.ptr())) throw py::type_error("a module has no __dict__");
    for (PyObject* name : names().hooks) add_hooks(item(own, name));
    add(module);
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(module));
    add(attribute(type, names().forward).ptr());
    add(item(own, names().forward));
    PyObject* training = item(own, names().training);
    note_flag(training ? training : attribute(module, names().training).ptr());
    PyObject *key = nullptr, *value = nullptr;
    PyObject* parameters = item(own, names().parameters);
    if (parameters != nullptr && PyDict_Check(parameters)) {
      for (Py_ssize_t at = 0; PyDict_Next(parameters, &at, &key, &value);) {
        note_flag(attribute(value, names().requires_grad).ptr());  // a parameter may be None
      }
    }
    state_.add_module(module, own.ptr());
    PyObject* children = item(own, names().modules);
    if (children == nullptr || !PyDict_Check(children)) return;
    for (Py_ssize_t at = 0; PyDict_Next(children, &at, &key, &value);) {
      if (value == Py_None) continue;
      add(value);
      waiting_.push_back(value);
    }
  }

  void add_hooks(PyObject* hooks) {
    if (hooks == nullptr || !PyDict_Check(hooks) || PyDict_GET_SIZE(hooks) == 0) return;
    // A copy: reading a hook's __module__ may run its own code, which may change the dict.
    const py::object copy = checked(PyDict_Copy(hooks));
    PyObject *key = nullptr, *hook = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(copy.ptr(), &at, &key, &hook);) {
      if (is_own(hook)) continue;
      add(key);
      add(hook);
    }
  }

  static bool is_own(PyObject* hook) {
    const py::object module = attribute(hook, names().module);
    if (!module || !PyUnicode_Check(module.ptr())) return false;
    const char* name = PyUnicode_AsUTF8(module.ptr());
    return name != nullptr && std::strncmp(name, kOwnModules, sizeof kOwnModules - 1) == 0;
  }

  // Borrowed; null where there is none.
  static PyObject* item(const py::object& dict, PyObject* name) {
    PyObject* value = PyDict_GetItemWithError(dict.ptr(), name);
    throw_if(value == nullptr && PyErr_Occurred());
    return value;
  }

  // Null where there is none.
  static py::object attribute(PyObject* owner, PyObject* name) {
    PyObject* value = PyObject_GetAttr(owner, name);
    if (value == nullptr) {
      throw_if(!PyErr_ExceptionMatches(PyExc_AttributeError));
      PyErr_Clear();
    }
    return steal(value);
  }

  void add(PyObject* value) { found_.push_back(borrow(value == nullptr ? Py_None : value)); }

  // FNV-1a, a byte for each flag.
  void note_flag(PyObject* flag) {
    const int is_set = flag == nullptr ? 0 : PyObject_IsTrue(flag);
    throw_if(is_set < 0);
    flags_ = (flags_ ^ static_cast<uint64_t>(is_set)) * 0x100000001b3ULL;
  }

  std::vector<PyObject*> waiting_;
  std::unordered_set<PyObject*> seen_;
  std::vector<py::object> found_;
  uint64_t flags_ = 0xcbf29ce484222325ULL;
  StateHash state_;
};

}  // namespace

std::tuple<py::list, uint64_t, uint64_t> walk_modules(const py::object& root,
                                                      const py::list& before,
                                                      const py::type& tensor_type,
                                                      const py::type& module_type) {
  Walk walk(tensor_type.ptr(), module_type.ptr());
  walk.visit(root.ptr());
  return {walk.is(before) ? before : walk.objects(), walk.flags(), walk.state()};
}

}  // namespace flex_model
