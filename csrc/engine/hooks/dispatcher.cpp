#include "dispatcher.h"

#include <algorithm>

#include "pytree/tree.h"

namespace flex_model {
namespace {

struct Strings {
  PyObject* detach = PyUnicode_InternFromString("detach");
  PyObject* clone = PyUnicode_InternFromString("clone");
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* layout = PyUnicode_InternFromString("layout");
  PyObject* is_quantized = PyUnicode_InternFromString("is_quantized");
  PyObject* is_nested = PyUnicode_InternFromString("is_nested");
  PyObject* is_inference = PyUnicode_InternFromString("is_inference");
};

// Never destroyed: the interpreter is gone before static destructors run.
const Strings& strings() {
  static const Strings* strings = new Strings();
  return *strings;
}

py::object steal(PyObject* object) { return py::reinterpret_steal<py::object>(object); }

py::object checked(PyObject* object) {
  if (object == nullptr) throw py::error_already_set();
  return steal(object);
}

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

bool Site::is_plain(PyObject* leaf, bool edits) const {
  if (reinterpret_cast<PyObject*>(Py_TYPE(leaf)) != dispatcher_->tensor_type.ptr()) return false;
  const py::object is_cpu = checked(PyObject_GetAttr(leaf, strings().is_cpu));
  if (is_cpu.ptr() != Py_True) return false;
  // Copies made in inference mode, or of its tensors, are not plain tensors.
  const py::object is_inference = checked(PyObject_CallMethodNoArgs(leaf, strings().is_inference));
  if (is_inference.ptr() != Py_False) return false;
  const py::object mode = checked(PyObject_CallNoArgs(dispatcher_->is_inference_mode.ptr()));
  if (mode.ptr() != Py_False) return false;
  if (!edits) return true;
  const py::object layout = checked(PyObject_GetAttr(leaf, strings().layout));
  const py::object is_quantized = checked(PyObject_GetAttr(leaf, strings().is_quantized));
  const py::object is_nested = checked(PyObject_GetAttr(leaf, strings().is_nested));
  return layout.is(dispatcher_->strided) && is_quantized.ptr() == Py_False &&
         is_nested.ptr() == Py_False;
}

bool Site::run_here(const Hook& hook, PyObject* module, py::object& tree) {
  Py_ssize_t num_leaves = 0;
  const py::object leaf = steal(leaf_at(tree.ptr(), hook.unpack_idx, &num_leaves));
  if (!leaf) {
    if (PyErr_Occurred()) throw py::error_already_set();
    return false;
  }
  if (!is_plain(leaf.ptr(), hook.edits_here)) return false;
  const py::object task = checked(PyObject_CallNoArgs(dispatcher_->current_graph_task.ptr()));
  if (PyLong_AsLong(task.ptr()) != -1) return false;

  if (hook.records_here) {
    PyObject* records = dispatcher_->records.ptr();
    py::object list = py::reinterpret_borrow<py::object>(
        PyDict_GetItemWithError(records, hook.record_name.ptr()));
    if (!list) {
      if (PyErr_Occurred()) throw py::error_already_set();
      list = checked(PyList_New(0));
      if (PyDict_SetItem(records, hook.record_name.ptr(), list.ptr()) < 0)
        throw py::error_already_set();
    }
    if (!PyList_CheckExact(list.ptr())) return false;
    const py::object detached = checked(PyObject_CallMethodNoArgs(leaf.ptr(), strings().detach));
    const py::object copy = checked(PyObject_CallMethodNoArgs(detached.ptr(), strings().clone));
    if (PyList_Append(list.ptr(), copy.ptr()) < 0) throw py::error_already_set();
  }
  if (!hook.edits_here) return true;

  const py::object copy = checked(PyObject_CallMethodNoArgs(leaf.ptr(), strings().clone));
  PyObject* arguments[] = {hook.registration.ptr(), module, leaf.ptr(), copy.ptr()};
  const py::object edit = dispatcher_->edit;  // the call may close the dispatcher
  const py::object edited = checked(PyObject_Vectorcall(edit.ptr(), arguments, 4, nullptr));
  if (!edited.is_none()) tree = checked(replace_leaf(tree.ptr(), hook.unpack_idx, edited.ptr()));
  return true;
}

PyObject* Site::run(PyObject* module, PyObject* tree) {
  const std::shared_ptr<const HookList> hooks = active_;
  py::object current = py::reinterpret_borrow<py::object>(tree);
  if (!module_.is_none() && PyWeakref_GetObject(module_.ptr()) != module)
    return current.release().ptr();
  for (const auto& hook : *hooks) {
    if (dispatcher_ == nullptr) break;  // an editing function restored the model
    const bool is_served = hook->records_here || hook->edits_here;
    if (is_served && dispatcher_->in_run && !hook->replays && run_here(*hook, module, current))
      continue;
    PyObject* arguments[] = {hook->registration.ptr(), module, current.ptr()};
    const py::object run_hook = dispatcher_->run_hook;  // the call may close the dispatcher
    current = checked(PyObject_Vectorcall(run_hook.ptr(), arguments, 3, nullptr));
  }
  return current.release().ptr();
}

void Dispatcher::close() {
  for (const auto& site : sites_) site->detach();
  sites_.clear();
  run_hook = edit = py::none();
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
