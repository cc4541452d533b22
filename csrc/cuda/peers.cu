// A barrier between the GPUs of one host, and memory that processes share by CUDA IPC.
#include <cstring>

#include "cuda/barrier.cuh"
#include "cuda/launch.h"

namespace flex_model {
namespace {

__global__ void peer_barrier_kernel(const __grid_constant__ Barrier barrier) {
  wait_for_peers(barrier);
}

}  // namespace
}  // namespace flex_model

extern "C" int flex_model_peer_barrier(const flex_model::Barrier* barrier, void* stream) {
  const int threads = (barrier->num_ranks + 31) / 32 * 32;
  return flex_model::launch(flex_model::peer_barrier_kernel, 1, threads,
                            static_cast<cudaStream_t>(stream), *barrier);
}

// On failure returns the error of cudaMalloc or cudaMemset, with nothing allocated.
extern "C" int flex_model_ipc_malloc(int64_t size, void** memory) {
  if (const cudaError_t error = cudaMalloc(memory, size)) return error;
  cudaError_t error = cudaMemset(*memory, 0, size);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error != cudaSuccess) cudaFree(*memory);
  return error;
}

extern "C" void flex_model_ipc_free(void* memory) {
  if (cudaFree(memory) != cudaSuccess) cudaGetLastError();  // the process may be ending
}

extern "C" int flex_model_ipc_handle(void* memory, void* handle) {
  static_assert(sizeof(cudaIpcMemHandle_t) == flex_model::kIpcHandleBytes, "as in launch.h");
  cudaIpcMemHandle_t own;
  const cudaError_t error = cudaIpcGetMemHandle(&own, memory);
  if (error == cudaSuccess) std::memcpy(handle, &own, sizeof(own));
  return error;
}

extern "C" int flex_model_ipc_open(const void* handle, void** memory) {
  cudaIpcMemHandle_t other;
  std::memcpy(&other, handle, sizeof(other));
  return cudaIpcOpenMemHandle(memory, other, cudaIpcMemLazyEnablePeerAccess);
}

extern "C" int flex_model_ipc_close(void* memory) { return cudaIpcCloseMemHandle(memory); }
