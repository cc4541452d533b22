// What the dispatcher uses of torch, through Python objects: the engine includes no header of
// torch, so that one build serves all its versions.
#pragma once

#include "python_objects.h"

namespace flex_model {

inline bool is_true(const py::object& value) { return value.ptr() == Py_True; }

// An attribute; its name is interned once.
class Name {
 public:
  explicit Name(const char* name) : name_(PyUnicode_InternFromString(name)) {}
  py::object of(const py::object& object) const {
    return checked(PyObject_GetAttr(object.ptr(), name_));
  }

 private:
  PyObject* name_;  // never released: the interpreter is gone before static destructors run
};

// What torch.Tensor has under a name, found at the first use: a lookup takes longer than most
// calls.
class OfTensor {
 public:
  explicit OfTensor(const char* name) : name_(name) {}

 protected:
  PyObject* found(const py::object& tensor) const {
    if (found_ == nullptr) found_ = py::object(py::type::of(tensor).attr(name_)).release().ptr();
    return found_;
  }

 private:
  const char* name_;
  mutable PyObject* found_ = nullptr;  // never released, either
};

// An attribute of tensors of that exact type, or of parameters, which have it from there.
struct Attribute : OfTensor {
  using OfTensor::OfTensor;
  py::object of(const py::object& tensor) const {
    PyObject* descriptor = found(tensor);
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
    return checked(Py_TYPE(descriptor)->tp_descr_get(descriptor, tensor.ptr(), type));
  }
};

// A method of them, without arguments.
struct Method : OfTensor {
  using OfTensor::OfTensor;
  py::object call(const py::object& tensor) const {
    return checked(PyObject_CallOneArg(found(tensor), tensor.ptr()));
  }
};

struct Names {
  Method detach{"detach"}, clone{"clone"}, contiguous{"contiguous"}, data_ptr{"data_ptr"};
  Method is_contiguous{"is_contiguous"}, untyped_storage{"untyped_storage"};
  Method is_conj{"is_conj"}, is_neg{"is_neg"};
  Method resizable{"resizable"};  // of a storage
  Attribute is_cpu{"is_cpu"}, is_cuda{"is_cuda"}, device{"device"}, dtype{"dtype"};
  Attribute layout{"layout"}, is_quantized{"is_quantized"}, is_nested{"is_nested"};
  Attribute shape{"shape"}, nbytes{"nbytes"}, version{"_version"};
  Attribute requires_grad{"requires_grad"}, backward_hooks{"_backward_hooks"};
  Name cdata{"_cdata"}, editing_function{"editing_function"}, given{"given"};
};

const Names& names();

// The functions of torch that are called, found once; by their names in `torch`.
struct TorchAccess {
  py::object torch;
  py::object tensor_type = torch.attr("Tensor");  // only this exact type is served
  py::object strided = torch.attr("strided");     // only tensors of this layout are edited
  // -1 outside of backward; inside, a forward is a recomputation.
  py::object current_graph_task = torch.attr("current_graph_task");
  py::object is_inference_mode = torch.attr("is_inference_mode");
  py::object is_grad_enabled = torch.attr("is_grad_enabled");
  py::object inference_mode = torch.attr("inference_mode");  // in force as long as its result lives
  // With one, something follows what runs.
  py::object num_dispatch_modes = torch.attr("num_dispatch_modes");
  // Whether one of them counts operations, for selective checkpointing: a copy would be one more.
  py::object is_selective = torch.attr("is_selective");
  // Of torch.func; None outside of them. Inside, a tensor is a wrapper that dies with it.
  py::object current_transform = torch.attr("current_transform");
  // Of tensors saved for backward; not None in a checkpoint.
  py::object saved_hooks = torch.attr("saved_hooks");
  py::object random_state = torch.attr("random_state");  // the CPU's generator's: a tensor of bytes
  py::object position_on_gpu = torch.attr("position_on_gpu");  // of the generator of a device
  py::object is_capturing = torch.attr("is_capturing");        // whether a CUDA graph is captured
  py::object storage_uses = torch.attr("storage_uses");        // how many owners a storage has

  bool is_in_inference_mode() const {
    return is_true(checked(PyObject_CallNoArgs(is_inference_mode.ptr())));
  }

  bool has_dispatch_modes() const {
    return PyLong_AsLong(checked(PyObject_CallNoArgs(num_dispatch_modes.ptr())).ptr()) != 0;
  }

  bool is_tensor(const py::object& object) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == tensor_type.ptr();
  }
};

// Whether nothing but `tensor` refers to it or to its memory; `tensor` must be the only handle.
bool is_alone(const TorchAccess& torch, const py::object& tensor);

// Where the generators stand: the CPU's, and that of a tensor's GPU.
class Draws {
 public:
  Draws(const TorchAccess& torch, const py::object& tensor, bool is_on_cpu);
  bool operator==(const Draws& other) const;

 private:
  py::object state_, position_;
};

}  // namespace flex_model
