#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "native_stack.h"

namespace py = pybind11;

namespace flex_model {

void bind_native_stack(py::module_& m) {
  m.def("stack_pointer", &stack_pointer, "The address at which this thread's stack ends now.");
  m.def("native_frames", &native_frames,
        R"(C functions other than Python's own whose calls are in progress, innermost first.

Args:
    base: Up to this frame: the ``stack_pointer`` further out.

Returns:
    The library of each, and the address at which it begins.)",
        py::arg("base"));
  m.def(
      "code_of",
      [](py::handle function) {
        if (!PyCFunction_Check(function.ptr())) throw py::type_error("expected a C function");
        return code_at(reinterpret_cast<uintptr_t>(PyCFunction_GET_FUNCTION(function.ptr())));
      },
      "The library of a Python function that is written in C, and the address of its code.",
      py::arg("function"));
}

}  // namespace flex_model
