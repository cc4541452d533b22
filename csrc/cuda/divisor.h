// Division by a number that is known before the kernel starts, by multiplication.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FLEX_MODEL_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLEX_MODEL_HOST_DEVICE inline
#endif

namespace flex_model {

// For numbers below 2^31.
// Source: Granlund and Montgomery, "Division by Invariant Integers using Multiplication",
// figure 4.1.
struct Divisor {
  uint32_t value;
  uint32_t magic;
  uint32_t shift;

  static Divisor of(uint32_t value) {
    uint32_t shift = 0;
    while ((uint64_t{1} << shift) < value) ++shift;
    const uint64_t power = uint64_t{1} << shift;
    return {value, static_cast<uint32_t>(((power - value) << 32) / value + 1), shift};
  }

  FLEX_MODEL_HOST_DEVICE uint32_t quotient(uint32_t n) const {
#ifdef __CUDA_ARCH__
    const uint32_t high = __umulhi(n, magic);
#else
    const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(n) * magic) >> 32);
#endif
    return (high + n) >> shift;
  }
};

}  // namespace flex_model
