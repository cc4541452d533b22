// Memory of the engine as a tensor, by a DLPack capsule: it is freed when the tensor dies.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "owned.h"

namespace flex_model {

// Makes a CPU tensor of contiguous memory. `code` and `bits` are DLPack's for its dtype.
pybind11::object as_tensor(Owned memory, std::vector<int64_t> sizes, int code, int bits);

// Makes an uninitialised CPU tensor in the arena; None if the arena is full.
pybind11::object lease_tensor(std::vector<int64_t> sizes, int code, int bits);

}  // namespace flex_model
