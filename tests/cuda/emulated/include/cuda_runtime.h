// What csrc/cuda uses of the CUDA language and runtime, on the CPU: memory of a device is memory of
// the process, a stream is a thread, and a thread of a kernel is a call. streams.cpp and memory.cpp
// implement it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads, ...)

struct Index {
  uint32_t x;
};
inline thread_local Index gridDim, blockDim, blockIdx, threadIdx;

// Aligned as on a GPU, so that the sanitizer finds misaligned accesses.
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace emulated {
inline std::atomic<uint32_t> num_streamed = 0;  // accesses
}

template <typename Value>
Value __ldcs(const Value* address) {
  emulated::num_streamed.fetch_add(1, std::memory_order_relaxed);
  return *address;
}
template <typename Value>
void __stcs(Value* address, Value value) {
  emulated::num_streamed.fetch_add(1, std::memory_order_relaxed);
  *address = value;
}

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidPitchValue = 12,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidContext = 201,
  cudaErrorMapBufferObjectFailed = 205,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorNotReady = 600,
  cudaErrorHostMemoryAlreadyRegistered = 712,
  cudaErrorHostMemoryNotRegistered = 713,
};
enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrL2CacheSize };
enum { cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2 };
enum { cudaIpcMemLazyEnablePeerAccess = 1 };

struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void* devicePointer;
  void* hostPointer;
};
struct cudaIpcMemHandle_t {
  char reserved[64];
};
using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;

#pragma GCC visibility push(default)
extern "C" {
void __nanosleep(unsigned ns);
void __syncthreads();
void __threadfence_system();

cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);

cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* data);
cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);

cudaError_t cudaMalloc(void** memory, size_t size);
cudaError_t cudaFree(void* memory);
cudaError_t cudaMemset(void* memory, int value, size_t size);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream);
cudaError_t cudaHostRegister(void* host, size_t size, unsigned flags);
cudaError_t cudaHostUnregister(void* host);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address);
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory);
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void* memory);

// Beyond CUDA: the size of the grid launched last, and the number of launches so far; the stream
// that torch calls current, by thread and device.
uint32_t emulated_last_num_blocks();
uint32_t emulated_num_launches();
cudaStream_t emulated_current_stream(int device);
void emulated_set_current_stream(int device, cudaStream_t stream);

// As Tensor.record_stream: once released, the memory waits for this stream, too.
void emulated_record_stream(void* memory, cudaStream_t stream);
}

namespace emulated {

// Returns `error`, and keeps it for cudaGetLastError.
cudaError_t result(cudaError_t error);

// Queues work that a stream's thread does.
void enqueue(cudaStream_t stream, std::function<void()> task);

// Queues a grid: calls `kernel` for every thread, in random order.
cudaError_t launch(std::function<void()> kernel, uint32_t blocks, uint32_t threads,
                   cudaStream_t stream);

// Memory of a device for torch: as its allocator, reuses freed memory in the order of the stream.
void* allocate(size_t size, int device);
void release(void* memory);

}  // namespace emulated
#pragma GCC visibility pop
