// Sums over a tensor's elements in one pass, in float64. Contract: schema.cpp.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "ops/check.h"

namespace flex_model {
namespace {

float load(const float* value) { return *value; }
double load(const double* value) { return *value; }

// The bits of a bfloat16 are the upper ones of a float.
float load(const uint16_t* value) {
  const uint32_t bits = uint32_t{*value} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

// Adds up in several lanes, which compilers turn into vectors: no sum waits for the one before.
template <typename Element>
[[gnu::always_inline]] inline void sum_up(const Element* values, int64_t count, double* result) {
  constexpr int kLanes = 16;
  using Wide = decltype(load(values));
  double totals[kLanes] = {}, squares[kLanes] = {};
  Wide largest[kLanes] = {};
  const auto add = [&](const Element* value, int lane) {
    const Wide one = load(value), size = std::abs(one);
    const double wide = one;
    totals[lane] += wide;
    squares[lane] += wide * wide;
    largest[lane] = size > largest[lane] ? size : largest[lane];
  };
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) add(values + at + lane, lane);
  }
  for (; at < count; ++at) add(values + at, 0);
  for (int lane = 0; lane < kLanes; ++lane) {
    result[0] += totals[lane];
    result[1] += squares[lane];
    result[2] = std::max(result[2], static_cast<double>(largest[lane]));
  }
  // NaN is larger than no number: it is seen in the sum of squares, where nothing cancels.
  if (std::isnan(result[1])) result[2] = std::numeric_limits<double>::quiet_NaN();
}

// Vectors of 256 bits read a tensor at the speed of memory; those of every x86-64 have 128.
#if defined(__x86_64__) && defined(__gnu_linux__)
#define FLEX_MODEL_CLONES [[gnu::target_clones("avx2", "default")]]
#else
#define FLEX_MODEL_CLONES
#endif
FLEX_MODEL_CLONES void sum_floats(const float* values, int64_t count, double* result) {
  sum_up(values, count, result);
}
FLEX_MODEL_CLONES void sum_doubles(const double* values, int64_t count, double* result) {
  sum_up(values, count, result);
}
FLEX_MODEL_CLONES void sum_bfloats(const uint16_t* values, int64_t count, double* result) {
  sum_up(values, count, result);
}

Tensor moments(const Tensor& tensor) {
  check_contiguous("moments", "tensor", tensor);
  Tensor result = torch::stable::new_zeros(tensor, {3}, ScalarType::Double);
  auto* values = static_cast<double*>(result.mutable_data_ptr());
  const void* elements = tensor.const_data_ptr();
  const ScalarType dtype = tensor.scalar_type();
  const int64_t count = tensor.numel();
  check(dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::BFloat16,
        "moments: `tensor` must be of float32, float64 or bfloat16; convert it first");
  if (dtype == ScalarType::Float) sum_floats(static_cast<const float*>(elements), count, values);
  if (dtype == ScalarType::Double) sum_doubles(static_cast<const double*>(elements), count, values);
  if (dtype == ScalarType::BFloat16)
    sum_bfloats(static_cast<const uint16_t*>(elements), count, values);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flex_model, CPU, m) { m.impl("moments", TORCH_BOX(&moments)); }

}  // namespace flex_model
