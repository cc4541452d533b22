// Memory of the arena as a tensor: a DLPack capsule, whose memory goes back when the tensor dies.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace flex_model {

// A contiguous CPU tensor of these sizes, uninitialised; None if the arena is full. `code` and
// `bits` are DLPack's of its dtype.
pybind11::object lease_tensor(std::vector<int64_t> sizes, int code, int bits);

}  // namespace flex_model
