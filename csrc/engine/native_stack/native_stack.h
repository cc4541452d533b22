// The C functions that have called Python, which has called us: what lies between two Python
// frames.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace flex_model {

struct NativeFrame {
  std::string file;    // the library or program of its code
  uintptr_t function;  // where the function begins
};

// Where the stack of this thread ends now.
uintptr_t stack_pointer();

NativeFrame code_at(uintptr_t function);

// From the innermost to the one whose frame lies at `base`, without those of Python itself, and
// without the ones of this library that ask. What has no unwinding tables ends the list.
std::vector<NativeFrame> native_frames(uintptr_t base);

}  // namespace flex_model
