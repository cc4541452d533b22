#include "torch_access.h"

#include <cstring>

namespace flex_model {

const Names& names() {
  static const Names* const kNames = new Names;
  return *kNames;
}

bool is_alone(const TorchAccess& torch, const py::object& tensor) {
  if (Py_REFCNT(tensor.ptr()) != 1) return false;
  py::object storage;
  try {
    storage = names().untyped_storage.call(tensor);
  } catch (const py::error_already_set&) {
    return false;  // a wrapper of torch.func has none
  }
  // Memory of others, as of numpy: who else has it is not counted.
  if (!is_true(names().resizable.call(storage))) return false;
  const py::object uses =
      checked(PyObject_CallOneArg(torch.storage_uses.ptr(), names().cdata.of(storage).ptr()));
  return PyLong_AsLong(uses.ptr()) == 2;  // the tensor, and the object `storage`
}

Draws::Draws(const TorchAccess& torch, const py::object& tensor, bool is_on_cpu)
    : state_(checked(PyObject_CallNoArgs(torch.random_state.ptr()))) {
  if (!is_on_cpu)
    position_ =
        checked(PyObject_CallOneArg(torch.position_on_gpu.ptr(), names().device.of(tensor).ptr()));
}

bool Draws::operator==(const Draws& other) const {
  if (position_ && !position_.equal(other.position_)) return false;
  static const size_t kBytes = PyLong_AsSize_t(names().nbytes.of(state_).ptr());
  const auto address = [](const py::object& tensor) {
    return PyLong_AsVoidPtr(names().data_ptr.call(tensor).ptr());
  };
  return std::memcmp(address(state_), address(other.state_), kBytes) == 0;
}

}  // namespace flex_model
