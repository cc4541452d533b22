#include <Python.h>  // before all else, as it asks for

#include "native_stack.h"

#include <dlfcn.h>
#include <unwind.h>

namespace flex_model {
namespace {

Dl_info info_of(uintptr_t address) {
  Dl_info info;
  return dladdr(reinterpret_cast<void*>(address), &info) != 0 ? info : Dl_info{"", nullptr};
}

const void* const kPython = info_of(reinterpret_cast<uintptr_t>(&PyObject_Call)).dli_fbase;
const void* const kOwn = info_of(reinterpret_cast<uintptr_t>(&native_frames)).dli_fbase;

struct Walk {
  uintptr_t base;
  bool is_outside = false;  // of the functions that ask
  std::vector<NativeFrame> found;
};

_Unwind_Reason_Code visit(_Unwind_Context* context, void* argument) {
  Walk& walk = *static_cast<Walk*>(argument);
  if (_Unwind_GetCFA(context) > walk.base) return _URC_END_OF_STACK;
  // A return address may be the first byte after a function that calls something at its very end.
  const uintptr_t code = _Unwind_GetIP(context) - 1;
  const Dl_info info = info_of(code);
  walk.is_outside |= info.dli_fbase == kPython;
  if (info.dli_fbase == nullptr || info.dli_fbase == kPython ||
      (info.dli_fbase == kOwn && !walk.is_outside)) {
    return _URC_NO_REASON;
  }
  void* function = _Unwind_FindEnclosingFunction(reinterpret_cast<void*>(code));
  walk.found.emplace_back(info.dli_fname, reinterpret_cast<uintptr_t>(function));
  return _URC_NO_REASON;
}

}  // namespace

uintptr_t stack_pointer() { return reinterpret_cast<uintptr_t>(__builtin_frame_address(0)); }

NativeFrame code_at(uintptr_t function) { return {info_of(function).dli_fname, function}; }

std::vector<NativeFrame> native_frames(uintptr_t base) {
  Walk walk{base};
  _Unwind_Backtrace(&visit, &walk);
  return walk.found;
}

}  // namespace flex_model
