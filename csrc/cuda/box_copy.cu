// Strided copies, several boxes in one launch: bytes move, so any dtype goes.
//
// Grid: (tiles of the largest copy, copies of the batch). A thread moves kUnroll chunks, a block
// apart, so that neighbouring threads read neighbouring chunks, and all its loads are in flight
// before the first store.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch.h"

namespace flex_model {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

template <typename Chunk>
__global__ __launch_bounds__(kThreads) void copy_boxes_kernel(
    const __grid_constant__ CopyBatch batch) {
  const Copy& copy = batch.copies[blockIdx.y];
  const uint32_t first = blockIdx.x * (kThreads * kUnroll) + threadIdx.x;
  if (first >= copy.num_chunks) return;

  Chunk chunks[kUnroll];
  char* targets[kUnroll];
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    const uint32_t i = first + k * kThreads;
    if (i >= copy.num_chunks) break;
    const char* source;
    copy.locate(i, sizeof(Chunk), &source, &targets[k]);
    chunks[k] =
        __ldcs(reinterpret_cast<const Chunk*>(source));  // read once: leave the cache to others
  }
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    if (first + k * kThreads >= copy.num_chunks) break;
    *reinterpret_cast<Chunk*>(targets[k]) = chunks[k];
  }
}

template <typename Chunk>
cudaError_t launch(const CopyBatch& batch, cudaStream_t stream) {
  uint32_t largest = 0;
  for (int c = 0; c < batch.num_copies; ++c)
    largest = std::max(largest, batch.copies[c].num_chunks);
  const uint32_t tiles = (largest + kThreads * kUnroll - 1) / (kThreads * kUnroll);
  copy_boxes_kernel<Chunk><<<dim3(tiles, batch.num_copies), kThreads, 0, stream>>>(batch);
  return cudaGetLastError();
}

}  // namespace
}  // namespace flex_model

extern "C" int flex_model_copy_boxes(const flex_model::CopyBatch* batch, int chunk_bytes,
                                     void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  switch (chunk_bytes) {
    case 16: return flex_model::launch<uint4>(*batch, on);
    case 8: return flex_model::launch<uint2>(*batch, on);
    case 4: return flex_model::launch<unsigned int>(*batch, on);
    case 2: return flex_model::launch<unsigned short>(*batch, on);
    case 1: return flex_model::launch<unsigned char>(*batch, on);
  }
  return cudaErrorInvalidValue;
}

extern "C" const char* flex_model_cuda_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
