// One batch of strided copies as a kernel takes it, and the index maths of that kernel.
//
// Free of CUDA and torch: the same code runs in the kernel (box_copy.cu) and in a test on the CPU.
// A copy is counted in chunks of 1, 2, 4, 8 or 16 bytes; no chunk straddles two runs. Every count
// fits 31 bits, so that one multiplication replaces each division.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FLEX_MODEL_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLEX_MODEL_HOST_DEVICE inline
#endif

namespace flex_model {

constexpr int kMaxLevels = 3;  // above the run; boxes with more are cut by the host
constexpr int kMaxCopies =
    32;  // per launch: the batch is a kernel parameter, and those hold 4 KB everywhere

// Division by a constant of numbers below 2^31.
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

// One box: runs of `run` chunks, repeated by the levels, innermost first. Strides are in bytes.
struct Copy {
  const char* from;
  char* to;
  int64_t from_strides[kMaxLevels];
  int64_t to_strides[kMaxLevels];
  Divisor run;
  Divisor counts[kMaxLevels];  // that of the outermost level is not used: what is left is its index
  uint32_t num_chunks;
  int32_t num_levels;

  // Where chunk `i` of the copy is read and written.
  FLEX_MODEL_HOST_DEVICE void locate(uint32_t i, int chunk_bytes, const char** read,
                                     char** write) const {
    uint32_t left = run.quotient(i);
    const uint32_t in_run = (i - left * run.value) * static_cast<uint32_t>(chunk_bytes);
    const char* source = from + in_run;
    char* target = to + in_run;
    for (int level = 0; level < kMaxLevels; ++level) {
      if (level >= num_levels) break;
      const uint32_t next = level + 1 < num_levels ? counts[level].quotient(left) : 0;
      const uint32_t index = left - next * counts[level].value;
      source += index * from_strides[level];
      target += index * to_strides[level];
      left = next;
    }
    *read = source;
    *write = target;
  }
};

struct CopyBatch {
  Copy copies[kMaxCopies];
  int32_t num_copies;
};

static_assert(sizeof(CopyBatch) <= 4096, "a kernel parameter may have 4 KB on every device");

}  // namespace flex_model
