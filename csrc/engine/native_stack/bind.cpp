#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "native_stack.h"

namespace py = pybind11;

namespace flex_model {
namespace {

std::pair<std::string, uintptr_t> pair_of(NativeFrame frame) {
  return {std::move(frame.file), frame.function};
}

}  // namespace

void bind_native_stack(py::module_& m) {
  m.def("stack_pointer", &stack_pointer, "Where the stack of this thread ends now: an address.");
  m.def(
      "native_frames",
      [](uintptr_t base) {
        std::vector<std::pair<std::string, uintptr_t>> pairs;
        for (NativeFrame& frame : native_frames(base)) pairs.push_back(pair_of(std::move(frame)));
        return pairs;
      },
      R"(C functions other than Python's own whose calls are under way, innermost first.

Args:
    base: Up to here: what `stack_pointer` said further out.

Returns:
    The library of each, and where in memory it begins.)",
      py::arg("base"));
  m.def(
      "code_of",
      [](py::handle function) {
        if (!PyCFunction_Check(function.ptr())) throw py::type_error("expected a C function");
        return pair_of(
            code_at(reinterpret_cast<uintptr_t>(PyCFunction_GET_FUNCTION(function.ptr()))));
      },
      "The library of a Python function that is written in C, and where in memory it begins.",
      py::arg("function"));
}

}  // namespace flex_model
