// In place of csrc/cuda/gpu.cuh.
#pragma once

#include <cuda_runtime.h>
#include <time.h>

#include <cstdlib>
#include <cstring>

namespace flex_model {

// Whether this is a build without code for the current device: one of the digits in this variable.
inline bool has_no_image() {
  const char* devices = std::getenv("FLEX_MODEL_EMULATED_NO_IMAGE");
  int device;
  cudaGetDevice(&device);
  return devices != nullptr && std::strchr(devices, '0' + device) != nullptr;
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), uint32_t blocks, uint32_t threads,
                   cudaStream_t stream, const Arguments&... arguments) {
  if (has_no_image()) return cudaErrorNoKernelImageForDevice;
  return emulated::launch([=] { kernel(arguments...); }, blocks, threads, stream);
}

inline void store_release(uint32_t* address, uint32_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

inline uint32_t load_acquire(const uint32_t* address) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

inline uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

}  // namespace flex_model
