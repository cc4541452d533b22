#include "settled_edit.h"

namespace flex_model {
namespace {

// What a copy of `leaf` is like before the edit: its version, which tells whether it was written
// to, and what an edit must not change.
py::tuple kind_of(const py::object& leaf, long version) {
  const Names& of = names();
  return py::make_tuple(version, of.shape.of(leaf), of.dtype.of(leaf), of.device.of(leaf),
                        of.layout.of(leaf));
}

// 0, but 1 of a copy of an inference tensor.
long version_of(const py::object& tensor) {
  return PyLong_AsLong(names().version.of(tensor).ptr());
}

// But for the layout, which no tensor can change in place.
bool has_kind_of(const py::object& leaf, bool is_on_cpu, const py::object& tensor) {
  const Names& of = names();
  if (!of.shape.of(tensor).equal(of.shape.of(leaf)) || !of.dtype.of(tensor).is(of.dtype.of(leaf)))
    return false;
  return is_on_cpu ? is_true(of.is_cpu.of(tensor)) : of.device.of(tensor).equal(of.device.of(leaf));
}

// A copy of the function's result, unless nothing else has its memory: the model may change it in
// place, where no two elements may be one. Contiguous if the model's own tensor is, since views of
// that work.
py::object for_model(const TorchAccess& torch, const py::object& leaf, py::object result) {
  const Names& of = names();
  if (is_true(of.is_contiguous.call(result)))
    return is_alone(torch, result) ? result : of.clone.call(result);
  return is_true(of.is_contiguous.call(leaf)) ? of.contiguous.call(result) : of.clone.call(result);
}

}  // namespace

py::object run_settled(const Dispatcher& dispatcher, const Hook& hook, PyObject* module,
                       const py::object& leaf, bool is_on_cpu, py::object& copy) {
  const std::shared_ptr<const Handlers> handlers = dispatcher.handlers;  // the call may close it
  const TorchAccess& torch = dispatcher.torch;
  const SettledEdit settled = hook.settled;
  const Draws draws(torch, leaf, is_on_cpu);
  const bool is_in_graph = is_true(names().requires_grad.of(copy));
  const Py_ssize_t references = Py_REFCNT(copy.ptr());
  const long version = version_of(copy);

  handlers->edit->set(settled.description);
  PyObject* arguments[] = {module, copy.ptr(), settled.save_ctx.ptr(), settled.modules.ptr()};
  py::object result = steal(PyObject_Vectorcall(settled.function.ptr(), arguments, 4, nullptr));
  if (!result) {
    const bool is_exception = PyErr_ExceptionMatches(PyExc_Exception);
    py::error_already_set error;
    handlers->edit->set(py::str());
    if (!is_exception) throw error;  // an interrupt
    handlers->hook_failed(hook.registration, error.value());
    return py::none();
  }
  handlers->edit->set(py::str());
  if (!(Draws(torch, leaf, is_on_cpu) == draws)) {
    handlers->edit_drew(hook.registration);
    return py::none();
  }

  if (result.is(copy)) result = py::none();
  const bool is_kept = is_in_graph && (Py_REFCNT(copy.ptr()) > references ||
                                       !names().backward_hooks.of(copy).is_none());
  const bool has_written = version_of(copy) != version;
  const Names& of = names();
  const bool is_usual = result.is_none()
                            ? has_kind_of(leaf, is_on_cpu, copy)
                            : torch.is_tensor(result) && has_kind_of(leaf, is_on_cpu, result) &&
                                  of.layout.of(result).is(of.layout.of(leaf));
  if (!is_usual) {
    const py::tuple before = kind_of(leaf, version);
    result = handlers->finish_edit(hook.registration, leaf, copy, before, result, is_kept);
    copy = {};
    return result;
  }
  if (result.is_none() && (has_written || is_kept)) {
    result = std::move(copy);
  } else if (!hook.records_here || has_written || !is_alone(torch, copy)) {
    copy = {};
  }
  // A part of it is copied where ranks hold parts.
  return result.is_none() || !hook.edits_here ? result : for_model(torch, leaf, std::move(result));
}

}  // namespace flex_model
