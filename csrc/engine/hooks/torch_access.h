// What the dispatcher uses of torch, through Python objects: the engine includes no header of
// torch, so that one build serves all its versions.
#pragma once

#include <pybind11/pybind11.h>

namespace flex_model {

namespace py = pybind11;

// Returns the object, or throws the Python error that is set.
inline py::object checked(PyObject* object) {
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

inline bool is_true(const py::object& value) { return value.ptr() == Py_True; }

// An attribute of a tensor, and a method without arguments. Names are interned once.
class Name {
 public:
  explicit Name(const char* name) : name_(PyUnicode_InternFromString(name)) {}
  py::object of(const py::object& object) const {
    return checked(PyObject_GetAttr(object.ptr(), name_));
  }
  void set(const py::object& object, const py::object& value) const {
    if (PyObject_SetAttr(object.ptr(), name_, value.ptr()) < 0) throw py::error_already_set();
  }
  py::object call(const py::object& object) const {
    return checked(PyObject_CallMethodNoArgs(object.ptr(), name_));
  }

 private:
  PyObject* name_;  // never released: the interpreter is gone before static destructors run
};

struct Names {
  Name detach{"detach"}, clone{"clone"}, contiguous{"contiguous"}, is_cpu{"is_cpu"},
      is_cuda{"is_cuda"};
  Name layout{"layout"}, is_quantized{"is_quantized"}, is_nested{"is_nested"};
  Name is_inference{"is_inference"}, is_contiguous{"is_contiguous"}, shape{"shape"};
  Name dtype{"dtype"}, device{"device"}, version{"_version"}, requires_grad{"requires_grad"};
  Name backward_hooks{"_backward_hooks"}, data_ptr{"data_ptr"}, nbytes{"nbytes"};
  Name untyped_storage{"untyped_storage"}, cdata{"_cdata"}, enter{"__enter__"};
  Name edit_of{"edit_of"}, editing_function{"editing_function"}, given{"given"};
};

const Names& names();

// The functions of torch that are called, found once.
struct TorchAccess {
  explicit TorchAccess(const py::object& torch);

  py::object tensor_type;         // torch.Tensor: only this exact type is served
  py::object strided;             // torch.strided: only tensors of this layout are edited
  py::object current_graph_task;  // -1 outside of backward; inside, a forward is a recomputation
  py::object is_inference_mode, is_grad_enabled;
  py::object inference_mode;      // a guard: inference_mode(is_on), __enter__, __exit__
  py::object num_dispatch_modes;  // with one, something follows what runs
  py::object saved_hooks;         // of tensors saved for backward; not None in a checkpoint
  py::object random_state;        // of the CPU's generator: a tensor of bytes
  py::object position_on_gpu;     // of the generator of a device
  py::object is_capturing;        // whether a CUDA graph is captured
  py::object storage_uses;        // how many owners a storage has

  bool is_tensor(const py::object& object) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == tensor_type.ptr();
  }
};

// Ends inference mode, if it is on, until it goes out of scope: copies that are made meanwhile are
// plain tensors.
class PlainMode {
 public:
  PlainMode(const TorchAccess& torch, bool is_inference);
  ~PlainMode();
  PlainMode(const PlainMode&) = delete;
  PlainMode& operator=(const PlainMode&) = delete;

 private:
  py::object guard_;
};

// Whether nothing but `tensor` refers to it or to its memory; `tensor` must be the only handle.
bool is_alone(const TorchAccess& torch, const py::object& tensor);

// Where the generators stand: the CPU's, and that of a tensor's GPU.
class Draws {
 public:
  Draws(const TorchAccess& torch, const py::object& tensor);
  bool operator==(const Draws& other) const;

 private:
  py::object state_, position_;
};

}  // namespace flex_model
