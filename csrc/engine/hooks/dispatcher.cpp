#include "dispatcher.h"

#include <algorithm>

#include "pytree/tree.h"

namespace flex_model {
namespace {

struct Strings {
  PyObject* detach = PyUnicode_InternFromString("detach");
  PyObject* clone = PyUnicode_InternFromString("clone");
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* is_inference = PyUnicode_InternFromString("is_inference");
};

// Never destroyed: the interpreter is gone before static destructors run.
const Strings& strings() {
  static const Strings* strings = new Strings();
  return *strings;
}

py::object steal(PyObject* object) { return py::reinterpret_steal<py::object>(object); }

}  // namespace

void Site::add(std::shared_ptr<Hook> hook) { hooks_.push_back(std::move(hook)); }

void Site::remove(const std::shared_ptr<Hook>& hook) {
  hooks_.erase(std::remove(hooks_.begin(), hooks_.end(), hook), hooks_.end());
}

void Site::detach() {
  dispatcher_ = nullptr;
  refresh();
}

bool Site::refresh() {
  auto active = std::make_shared<HookList>();
  for (const auto& hook : hooks_) {
    if (dispatcher_ != nullptr && dispatcher_->is_active(*hook)) active->push_back(hook);
  }
  const bool changed = active->empty() != active_->empty();
  active_ = std::move(active);
  return changed;
}

int Site::record(const Hook& hook, PyObject* tree) {
  Py_ssize_t num_leaves = 0;
  const py::object leaf = steal(leaf_at(tree, hook.unpack_idx, &num_leaves));
  if (!leaf) return PyErr_Occurred() ? -1 : 0;
  if (reinterpret_cast<PyObject*>(Py_TYPE(leaf.ptr())) != dispatcher_->tensor_type.ptr()) return 0;

  const py::object is_cpu = steal(PyObject_GetAttr(leaf.ptr(), strings().is_cpu));
  if (!is_cpu) return -1;
  const py::object is_inference =
      steal(PyObject_CallMethodNoArgs(leaf.ptr(), strings().is_inference));
  if (!is_inference) return -1;
  if (is_cpu.ptr() != Py_True || is_inference.ptr() != Py_False) return 0;

  const py::object task = steal(PyObject_CallNoArgs(dispatcher_->current_graph_task.ptr()));
  if (!task) return -1;
  if (PyLong_AsLong(task.ptr()) != -1) return 0;

  const py::object detached = steal(PyObject_CallMethodNoArgs(leaf.ptr(), strings().detach));
  if (!detached) return -1;
  const py::object copy = steal(PyObject_CallMethodNoArgs(detached.ptr(), strings().clone));
  if (!copy) return -1;

  PyObject* records = dispatcher_->records.ptr();
  PyObject* list = PyDict_GetItemWithError(records, hook.record_name.ptr());  // borrowed
  if (list == nullptr) {
    if (PyErr_Occurred()) return -1;
    const py::object fresh = steal(PyList_New(0));
    if (!fresh || PyDict_SetItem(records, hook.record_name.ptr(), fresh.ptr()) < 0) return -1;
    return PyList_Append(fresh.ptr(), copy.ptr()) < 0 ? -1 : 1;
  }
  if (!PyList_CheckExact(list)) return 0;
  return PyList_Append(list, copy.ptr()) < 0 ? -1 : 1;
}

PyObject* Site::run(PyObject* module, PyObject* tree) {
  const std::shared_ptr<const HookList> hooks = active_;
  py::object current = py::reinterpret_borrow<py::object>(tree);
  if (!module_.is_none() && PyWeakref_GetObject(module_.ptr()) != module)
    return current.release().ptr();
  for (const auto& hook : *hooks) {
    if (dispatcher_ == nullptr) break;  // an editing function restored the model
    if (hook->records_here && dispatcher_->in_run) {
      const int recorded = record(*hook, current.ptr());
      if (recorded < 0) return nullptr;
      if (recorded) continue;
    }
    PyObject* arguments[] = {hook->registration.ptr(), module, current.ptr()};
    const py::object run_hook = dispatcher_->run_hook;  // the call may close the dispatcher
    py::object result = steal(PyObject_Vectorcall(run_hook.ptr(), arguments, 3, nullptr));
    if (!result) return nullptr;
    current = std::move(result);
  }
  return current.release().ptr();
}

void Dispatcher::close() {
  for (const auto& site : sites_) site->detach();
  sites_.clear();
  run_hook = py::none();
}

std::shared_ptr<Site> Dispatcher::add_site(py::object module_ref) {
  sites_.push_back(std::make_shared<Site>(this, std::move(module_ref)));
  return sites_.back();
}

void Dispatcher::remove_site(const std::shared_ptr<Site>& site) {
  site->detach();
  sites_.erase(std::remove(sites_.begin(), sites_.end(), site), sites_.end());
}

std::vector<std::shared_ptr<Site>> Dispatcher::activate(const std::vector<size_t>& groups,
                                                        bool complement) {
  active_ = GroupSet();
  for (size_t group : groups) active_.insert(group);
  complement_ = complement;
  std::vector<std::shared_ptr<Site>> changed;
  for (const auto& site : sites_) {
    if (site->refresh()) changed.push_back(site);
  }
  return changed;
}

void Dispatcher::clear_records() {
  for (const auto& site : sites_) {
    for (const auto& hook : *site->active()) {
      PyObject* name = hook->record_name.ptr();
      const int present = PyDict_Contains(records.ptr(), name);
      if (present < 0 || (present && PyDict_DelItem(records.ptr(), name) < 0))
        throw py::error_already_set();
    }
  }
}

}  // namespace flex_model
