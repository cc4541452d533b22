// The C functions that have called Python on this thread's stack: what lies between two Python
// frames.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <dlfcn.h>
#include <unwind.h>

namespace py = pybind11;

namespace flex_model {
namespace {

// The library or program that holds a function, and the address at which the function begins.
using NativeFrame = std::pair<std::string, uintptr_t>;

struct Walk {
  uintptr_t base;
  const void* python;
  const void* own;
  bool is_outside = false;  // of the functions that ask
  std::vector<NativeFrame> found;
};

Dl_info info_of(uintptr_t address) {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(address), &info) != 0) return info;
  info = {};
  info.dli_fname = "";
  return info;
}

_Unwind_Reason_Code visit(_Unwind_Context* context, void* argument) {
  Walk& walk = *static_cast<Walk*>(argument);
  if (_Unwind_GetCFA(context) > walk.base) return _URC_END_OF_STACK;
  // A return address may be the first byte after a function that calls something at its very end.
  const uintptr_t code = _Unwind_GetIP(context) - 1;
  const Dl_info info = info_of(code);
  walk.is_outside |= info.dli_fbase == walk.python;
  if (info.dli_fbase == nullptr || info.dli_fbase == walk.python ||
      (info.dli_fbase == walk.own && !walk.is_outside)) {
    return _URC_NO_REASON;
  }
  void* function = _Unwind_FindEnclosingFunction(reinterpret_cast<void*>(code));
  walk.found.emplace_back(info.dli_fname, reinterpret_cast<uintptr_t>(function));
  return _URC_NO_REASON;
}

uintptr_t stack_pointer() { return reinterpret_cast<uintptr_t>(__builtin_frame_address(0)); }

// Without the frames of Python itself, and without the ones of this library that ask. What has no
// unwinding tables ends the list.
std::vector<NativeFrame> native_frames(uintptr_t base) {
  Walk walk{base,
            info_of(reinterpret_cast<uintptr_t>(&PyObject_Call)).dli_fbase,
            info_of(reinterpret_cast<uintptr_t>(&native_frames)).dli_fbase,
            false,
            {}};
  _Unwind_Backtrace(&visit, &walk);
  return walk.found;
}

NativeFrame code_of(py::handle function) {
  if (!PyCFunction_Check(function.ptr())) throw py::type_error("expected a C function");
  const auto code = reinterpret_cast<uintptr_t>(PyCFunction_GET_FUNCTION(function.ptr()));
  return {info_of(code).dli_fname, code};
}

}  // namespace

void bind_native_stack(py::module_& m) {
  m.def("stack_pointer", &stack_pointer, "The address at which this thread's stack ends now.");
  m.def("native_frames", &native_frames,
        R"(C functions other than Python's own whose calls are in progress, innermost first.

Args:
    base: Up to this frame: the ``stack_pointer`` further out.

Returns:
    The library of each, and the address at which it begins.)",
        py::arg("base"));
  m.def("code_of", &code_of,
        "The library of a Python function that is written in C, and the address of its code.",
        py::arg("function"));
}

}  // namespace flex_model
