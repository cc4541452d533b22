#include "dispatcher.h"

#include <algorithm>
#include <utility>

#include "pytree/tree.h"
#include "settled_edit.h"

namespace flex_model {
namespace {

// Whether a tensor has these sizes, of which None is any.
bool has_shape(const py::object& tensor, const py::tuple& sizes) {
  const py::object shape = names().shape.of(tensor);
  const Py_ssize_t num_dims = PyTuple_GET_SIZE(sizes.ptr());
  if (PyTuple_GET_SIZE(shape.ptr()) != num_dims) return false;
  for (Py_ssize_t dim = 0; dim < num_dims; ++dim) {
    PyObject* size = PyTuple_GET_ITEM(sizes.ptr(), dim);
    if (size != Py_None &&
        PyLong_AsSsize_t(size) != PyLong_AsSsize_t(PyTuple_GET_ITEM(shape.ptr(), dim)))
      return false;
  }
  return true;
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

py::object Site::plain_leaf(const Hook& hook, const py::object& tree, bool is_inference) const {
  const TorchAccess& torch = dispatcher_->torch;
  Py_ssize_t num_leaves = 0;
  py::object leaf = leaf_at(tree.ptr(), hook.unpack_idx, &num_leaves);
  if (!leaf || !torch.is_tensor(leaf)) return {};
  if (is_inference) return leaf;  // no backward recomputes there
  const py::object task = checked(PyObject_CallNoArgs(torch.current_graph_task.ptr()));
  return PyLong_AsLong(task.ptr()) == -1 ? leaf : py::object();
}

bool Site::run_gathered(const Hook& hook, PyObject* module, py::object& tree) {
  const py::object leaf = plain_leaf(hook, tree, dispatcher_->torch.is_in_inference_mode());
  if (!leaf || !dispatcher_->is_settled(hook)) return false;
  const auto handlers = dispatcher_->handlers;  // a call may close the dispatcher
  // (full, like, scatter): the full tensor, one of its shape, dtype and device, and a function from
  // the edited full tensor to the model's. Empty: the hook has failed.
  py::object found = handlers->gather_settled(hook.registration, leaf);
  if (found.is_none()) return false;
  if (PyTuple_GET_SIZE(found.ptr()) == 0) return true;
  auto [full, like, scatter] = found.cast<std::tuple<py::object, py::object, py::object>>();
  found = {};  // which would count as a reference of the function's
  const py::object edited = run_settled(*dispatcher_, hook, module, like, true, full);
  if (!edited.is_none()) tree = replace_leaf(tree.ptr(), hook.unpack_idx, scatter(edited).ptr());
  return true;
}

bool Site::run_here(const Hook& hook, PyObject* module, py::object& tree) {
  const TorchAccess& torch = dispatcher_->torch;
  const bool is_inference = torch.is_in_inference_mode();
  const py::object leaf = plain_leaf(hook, tree, is_inference);
  if (!leaf) return false;
  const Names& of = names();
  const bool is_settled = hook.edits_here && dispatcher_->is_settled(hook);
  const bool is_on_cpu = is_true(of.is_cpu.of(leaf));
  if (!is_on_cpu) {
    // A record of a GPU's tensor is delivered when the run ends, and a graph can't be captured.
    if (!is_settled || hook.records_here || !is_true(of.is_cuda.of(leaf))) return false;
    if (is_true(checked(PyObject_CallNoArgs(torch.is_capturing.ptr())))) return false;
  }
  if (!is_settled && !is_inference && torch.has_dispatch_modes() &&
      is_true(checked(PyObject_CallNoArgs(torch.is_selective.ptr()))))
    return false;
  if (hook.expected_shape && !has_shape(leaf, *hook.expected_shape)) return false;
  if (hook.edits_here && !(of.layout.of(leaf).is(torch.strided) &&
                           !is_true(of.is_quantized.of(leaf)) && !is_true(of.is_nested.of(leaf)))) {
    return false;
  }

  if (hook.records_here && !checked(PyObject_CallNoArgs(torch.current_transform.ptr())).is_none()) {
    return false;
  }
  const py::object list = hook.records_here ? record_list(hook) : py::none();
  if (hook.records_here && !PyList_CheckExact(list.ptr())) return false;
  const auto record = [&](const py::object& tensor) {
    throw_if(PyList_Append(list.ptr(), tensor.ptr()) < 0);
  };
  const bool has_graph = is_true(of.requires_grad.of(leaf));
  const auto copied = [&](bool in_graph) {
    py::object plain;  // a copy made in inference mode is no plain tensor
    if (is_inference) plain = checked(PyObject_CallOneArg(torch.inference_mode.ptr(), Py_False));
    return of.clone.call(has_graph && !in_graph ? of.detach.call(leaf) : leaf);
  };
  if (!hook.edits_here) {
    record(copied(false));
    return true;
  }
  py::object after, copy = copied(true);
  if (is_settled) {
    after = run_settled(*dispatcher_, hook, module, leaf, is_on_cpu, copy);
    // The copy is the record if it is as it was, and no one else has it.
    if (hook.records_here)
      record(!copy                                ? copied(false)
             : is_true(of.requires_grad.of(copy)) ? of.detach.call(copy)
                                                  : copy);
  } else {
    if (hook.records_here) record(copied(false));
    PyObject* arguments[] = {hook.registration.ptr(), module, leaf.ptr(), copy.ptr()};
    const auto handlers = dispatcher_->handlers;  // the call may close the dispatcher
    after = checked(PyObject_Vectorcall(handlers->edit_whole.ptr(), arguments, 4, nullptr));
  }
  if (!after.is_none()) tree = replace_leaf(tree.ptr(), hook.unpack_idx, after.ptr());
  return true;
}

py::object Site::record_list(const Hook& hook) const {
  PyObject* records = dispatcher_->records.ptr();
  PyObject* name = hook.record_name.ptr();
  if (PyDict_CheckExact(records)) {
    PyObject* list = PyDict_GetItemWithError(records, name);
    if (list != nullptr) return borrow(list);
    throw_if(PyErr_Occurred() != nullptr);
  } else {
    const int present = PySequence_Contains(records, name);
    throw_if(present < 0);
    if (present) return checked(PyObject_GetItem(records, name));
  }
  py::object list = checked(PyList_New(0));
  throw_if(PyObject_SetItem(records, name, list.ptr()) < 0);
  return list;
}

py::object Site::run(PyObject* module, PyObject* tree) {
  const std::shared_ptr<const HookList> hooks = active_;
  py::object current = borrow(tree);
  if (!module_.is_none() && !refers_to(module_.ptr(), module)) return current;
  if (dispatcher_ != nullptr) last_run_ = dispatcher_->run_number;
  for (const auto& hook : *hooks) {
    if (dispatcher_ == nullptr) break;  // an editing function restored the model
    if (std::find(hooks_.begin(), hooks_.end(), hook) == hooks_.end()) continue;  // or removed it
    if (dispatcher_->in_run() && !hook->replays && !dispatcher_->handlers->edit->is_set) {
      const bool is_whole = hook->records_here || hook->edits_here;
      if (is_whole ? run_here(*hook, module, current)
                   : hook->settled.function && run_gathered(*hook, module, current))
        continue;
    }
    PyObject* arguments[] = {hook->registration.ptr(), module, current.ptr()};
    const auto handlers = dispatcher_->handlers;  // the call may close the dispatcher
    current = checked(PyObject_Vectorcall(handlers->forward.ptr(), arguments, 3, nullptr));
  }
  return current;
}

void Dispatcher::close() {
  for (const auto& site : sites_) site->detach();
  sites_.clear();
  handlers = nullptr;
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
  active_ = std::set(groups.begin(), groups.end());
  complement_ = complement;
  std::vector<std::shared_ptr<Site>> changed;
  for (const auto& site : sites_) {
    if (site->refresh()) changed.push_back(site);
  }
  return changed;
}

bool Dispatcher::set_in_run(bool in_run) {
  settled_thread_ = 0;
  return std::exchange(in_run_, in_run);
}

void Dispatcher::settle(bool is_recomputed) {
  settled_thread_ = PyThread_get_thread_ident();
  is_recomputed_ = is_recomputed;
}

bool Dispatcher::is_settled(const Hook& hook) const {
  if (!hook.settled.function || settled_thread_ != PyThread_get_thread_ident()) return false;
  const auto returned = [](const py::object& function) {
    return checked(PyObject_CallNoArgs(function.ptr()));
  };
  const py::object function = names().editing_function.of(names().given.of(hook.registration));
  if (!function.is(hook.settled.function)) return false;  // replaced, or taken off
  if (torch.has_dispatch_modes()) return false;
  return is_recomputed_ ||
         (is_true(returned(torch.is_grad_enabled)) && returned(torch.saved_hooks).is_none());
}

}  // namespace flex_model
