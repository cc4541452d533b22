// Page-locks host memory, and copies rows from a GPU to it by the copy engine.
#include <cuda_runtime.h>

#include "cuda/launch.h"

extern "C" int flex_model_copy_rows(const flex_model::RowCopy* copy, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (copy->num_rows == 1) {
    return cudaMemcpyAsync(copy->to, copy->from, copy->row_bytes, cudaMemcpyDeviceToHost, on);
  }
  return cudaMemcpy2DAsync(copy->to, copy->to_pitch, copy->from, copy->from_pitch, copy->row_bytes,
                           copy->num_rows, cudaMemcpyDeviceToHost, on);
}

extern "C" int flex_model_mapped_address(const void* host, void** mapped) {
  *mapped = nullptr;
  cudaPointerAttributes attributes;
  if (const cudaError_t error = cudaPointerGetAttributes(&attributes, host)) return error;
  if (attributes.type == cudaMemoryTypeHost) *mapped = attributes.devicePointer;
  return cudaSuccess;
}

extern "C" int flex_model_page_lock(void* host, int64_t size) {
  return cudaHostRegister(host, size, cudaHostRegisterPortable | cudaHostRegisterMapped);
}

extern "C" int flex_model_page_unlock(void* host) { return cudaHostUnregister(host); }
