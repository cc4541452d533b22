// Memory of the engine as a tensor: a DLPack capsule, whose memory goes back when the tensor dies.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "owned.h"

namespace flex_model {

// Contiguous memory as a CPU tensor of these sizes. `code` and `bits` are DLPack's of its dtype.
pybind11::object as_tensor(Owned memory, std::vector<int64_t> sizes, int code, int bits);

// The same of memory of the arena, uninitialised; None if the arena is full.
pybind11::object lease_tensor(std::vector<int64_t> sizes, int code, int bits);

}  // namespace flex_model
