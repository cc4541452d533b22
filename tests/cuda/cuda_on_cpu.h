// What a kernel without shared memory uses of CUDA, for a kernel that runs on the CPU, one thread
// after the other.
#pragma once

#include <cstdint>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)

struct Index {
  uint32_t x;
};
inline Index blockIdx, threadIdx, gridDim;

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

template <typename Value>
Value __ldcs(const Value* address) {
  return *address;
}
template <typename Value>
void __stcs(Value* address, Value value) {
  *address = value;
}

// Calls `kernel(arguments...)` as a launch of so many blocks and threads does.
template <typename Kernel, typename... Arguments>
void launch_on_cpu(Kernel kernel, uint32_t blocks, uint32_t threads,
                   const Arguments&... arguments) {
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(arguments...);
  }
}
