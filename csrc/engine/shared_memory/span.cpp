#include "span.h"

namespace flex_model {
namespace {

namespace py = pybind11;

// Interned names, and the torch classes whose tensors have plain memory; live as long as the
// process.
struct Known {
  py::object tensor = py::module_::import("torch").attr("Tensor");
  py::object parameter = py::module_::import("torch").attr("nn").attr("Parameter");
  py::str is_cpu{"is_cpu"}, is_contiguous{"is_contiguous"}, is_conj{"is_conj"}, is_neg{"is_neg"};
  py::str data_ptr{"data_ptr"}, nbytes{"nbytes"};
};

const Known& known() {
  static const Known* const kKnown = new Known;  // never freed: Python may be gone before
  return *kKnown;
}

py::object call(py::handle tensor, const py::str& method) {
  PyObject* result = PyObject_CallMethodNoArgs(tensor.ptr(), method.ptr());
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

bool is_true(py::handle value) { return value.ptr() == Py_True; }

}  // namespace

Span Span::of(py::handle tensor) {
  if (tensor.is_none()) return {};
  const Known& names = known();
  const py::handle type = py::type::handle_of(tensor);
  const bool is_plain =
      (type.is(names.tensor) || type.is(names.parameter)) && is_true(tensor.attr(names.is_cpu)) &&
      is_true(call(tensor, names.is_contiguous)) && !is_true(call(tensor, names.is_conj)) &&
      !is_true(call(tensor, names.is_neg));
  if (!is_plain) {
    throw py::type_error("expected a contiguous CPU tensor of the class Tensor, got a " +
                         std::string(py::str(type.attr("__name__"))) +
                         "; see flex_model.distributed.plain");
  }
  const auto address = call(tensor, names.data_ptr).cast<uintptr_t>();
  return {reinterpret_cast<char*>(address), tensor.attr(names.nbytes).cast<int64_t>()};
}

}  // namespace flex_model
