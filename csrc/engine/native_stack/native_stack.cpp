#include <Python.h>  // before all else, as it asks for

#include "native_stack.h"

#include <dlfcn.h>
#include <unwind.h>

namespace flex_model {
namespace {

const void* library_of(void* address) {
  Dl_info info;
  return dladdr(address, &info) != 0 ? info.dli_fbase : nullptr;
}

struct Walk {
  uintptr_t base;
  const void* python = library_of(reinterpret_cast<void*>(&PyObject_Call));
  const void* own = library_of(reinterpret_cast<void*>(&native_frames));
  bool is_outside = false;  // of the functions that ask
  std::vector<NativeFrame> found;
};

_Unwind_Reason_Code visit(_Unwind_Context* context, void* argument) {
  Walk& walk = *static_cast<Walk*>(argument);
  if (_Unwind_GetCFA(context) > walk.base) return _URC_END_OF_STACK;
  // A return address may be the first byte after a function that calls something at its very end.
  void* code = reinterpret_cast<void*>(_Unwind_GetIP(context) - 1);
  Dl_info info;
  if (dladdr(code, &info) == 0) return _URC_NO_REASON;
  if (info.dli_fbase == walk.python) walk.is_outside = true;
  if (info.dli_fbase == walk.python || (info.dli_fbase == walk.own && !walk.is_outside)) {
    return _URC_NO_REASON;
  }
  void* function = _Unwind_FindEnclosingFunction(code);
  walk.found.push_back({info.dli_fname, reinterpret_cast<uintptr_t>(function)});
  return _URC_NO_REASON;
}

}  // namespace

uintptr_t stack_pointer() { return reinterpret_cast<uintptr_t>(__builtin_frame_address(0)); }

NativeFrame code_at(uintptr_t function) {
  Dl_info info;
  const bool is_known = dladdr(reinterpret_cast<void*>(function), &info) != 0;
  return {is_known ? info.dli_fname : "", function};
}

std::vector<NativeFrame> native_frames(uintptr_t base) {
  Walk walk{base};
  _Unwind_Backtrace(&visit, &walk);
  return walk.found;
}

}  // namespace flex_model
