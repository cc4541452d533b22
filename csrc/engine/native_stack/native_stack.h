// The C functions that have called Python on this thread's stack: what lies between two Python
// frames.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace flex_model {

// The library or program that holds a function, and the address at which the function begins.
using NativeFrame = std::pair<std::string, uintptr_t>;

// The address at which the stack of this thread ends now.
uintptr_t stack_pointer();

NativeFrame code_at(uintptr_t function);

// From the innermost to the one whose frame lies at `base`, without those of Python itself, and
// without the ones of this library that ask. What has no unwinding tables ends the list.
std::vector<NativeFrame> native_frames(uintptr_t base);

}  // namespace flex_model
