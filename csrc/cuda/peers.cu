// A barrier between the GPUs of one host, and memory that processes share by CUDA IPC.
#include <cstring>

#include "cuda/gpu.cuh"
#include "cuda/launch.h"

namespace flex_model {
namespace {

constexpr uint64_t kPatienceNs = 20'000;  // before host memory is read, which takes a microsecond

// One thread per peer. A peer that never arrives must not block the GPU indefinitely, and a trap
// would destroy the user's CUDA context: after the deadline, or when the host gives up, the thread
// records the peer and ends, and the host raises before data that was read too early leaves a run.
__global__ void peer_barrier_kernel(const __grid_constant__ SignalPads pads, uint32_t number,
                                    uint64_t timeout_ns, volatile WaitState* state) {
  const int peer = threadIdx.x;
  if (peer >= pads.num_ranks || peer == pads.rank) return;
  // A release: earlier writes of this stream become visible before the signal.
  store_release(pads.of_rank[peer] + pads.rank, number);
  const uint32_t* flag = pads.of_rank[pads.rank] + peer;
  const uint64_t start = now_ns();
  while (static_cast<int32_t>(load_acquire(flag) - number) < 0) {
    const uint64_t waited = now_ns() - start;
    if (waited > timeout_ns || (waited > kPatienceNs && state->is_over)) {
      state->missing = 1 + peer;
      __threadfence_system();
      return;
    }
    __nanosleep(100);
  }
}

}  // namespace
}  // namespace flex_model

extern "C" int flex_model_peer_barrier(const flex_model::SignalPads* pads, uint32_t number,
                                       uint64_t timeout_ns, void* state, void* stream) {
  const int threads = (pads->num_ranks + 31) / 32 * 32;
  return flex_model::launch(flex_model::peer_barrier_kernel, 1, threads,
                            static_cast<cudaStream_t>(stream), *pads, number, timeout_ns,
                            static_cast<volatile flex_model::WaitState*>(state));
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
