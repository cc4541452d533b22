// A 64-bit hash of a tensor's bytes, and whether all its elements are the same. Contract:
// schema.cpp.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "ops/check.h"
#include "ops/hash_bytes.h"

namespace flex_model {
namespace {

// All elements are equal if each equals the next: the bytes shifted by one element are equal to the
// bytes.
bool is_constant(const unsigned char* bytes, int64_t size, int64_t element_bytes) {
  return size <= element_bytes ||
         std::memcmp(bytes, bytes + element_bytes, size - element_bytes) == 0;
}

Tensor fingerprint(const Tensor& tensor) {
  check_contiguous("fingerprint", "tensor", tensor);
  const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  const int64_t size = num_bytes(tensor);
  check(bytes != nullptr || size == 0,
        "fingerprint: `tensor` has no memory at its address; pass a ", "plain one");
  Tensor result = torch::stable::new_empty(tensor, {2}, ScalarType::Long);
  auto* values = static_cast<int64_t*>(result.mutable_data_ptr());
  values[0] = static_cast<int64_t>(hash_bytes(bytes, size));
  values[1] = is_constant(bytes, size, tensor.element_size());
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flex_model, CPU, m) { m.impl("fingerprint", TORCH_BOX(&fingerprint)); }

}  // namespace flex_model
