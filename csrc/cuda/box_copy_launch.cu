// Launches of the strided copies.
#include <algorithm>

#include "cuda/box_copy_kernels.cuh"
#include "cuda/gpu.cuh"
#include "cuda/launch.h"

namespace flex_model {
namespace {

template <bool kStreams, typename Batch>
cudaError_t copy(const Batch& batch, const Cut& cut, uint32_t max_blocks, void* stream) {
  const auto start = [&](auto kernel) {
    return launch(kernel, std::min(max_blocks, batch.num_blocks), kThreads,
                  static_cast<cudaStream_t>(stream), batch);
  };
  if (cut.windows) {
    switch (cut.unit) {
      case 4: return start(copy_windows<uint32_t, kStreams, Batch>);
      case 2: return start(copy_windows<uint16_t, kStreams, Batch>);
      case 1: return start(copy_windows<uint8_t, kStreams, Batch>);
    }
    return cudaErrorInvalidValue;
  }
  switch (cut.unit) {
    case 16: return start(copy_chunks<uint4, kStreams, Batch>);
    case 8: return start(copy_chunks<uint2, kStreams, Batch>);
    case 4: return start(copy_chunks<unsigned int, kStreams, Batch>);
    case 2: return start(copy_chunks<unsigned short, kStreams, Batch>);
    case 1: return start(copy_chunks<unsigned char, kStreams, Batch>);
  }
  return cudaErrorInvalidValue;
}

// Without `max_blocks` the grid fills the device: its blocks go from tile to tile. Bytes that are
// read and written leave nothing else in a cache that they exceed; smaller results stay in it for
// the editing function, which reads them at once.
template <typename Batch>
cudaError_t copy(const Batch& batch, const Cut& cut, uint32_t max_blocks, void* stream) {
  int device, multiprocessors, cache_bytes;
  cudaError_t error = cudaGetDevice(&device);
  const auto ask = [&](int* value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
  };
  ask(&multiprocessors, cudaDevAttrMultiProcessorCount);
  ask(&cache_bytes, cudaDevAttrL2CacheSize);
  if (error != cudaSuccess) return error;
  if (max_blocks == 0) max_blocks = multiprocessors * (cut.windows ? kWindowBlocks : kChunkBlocks);
  return batch.num_bytes >= cache_bytes / 2 ? copy<true>(batch, cut, max_blocks, stream)
                                            : copy<false>(batch, cut, max_blocks, stream);
}

template <typename Batch>
cudaError_t copy(const Batch& batch, const Cut& cut, uint32_t max_blocks, const Barrier* barrier,
                 void* stream) {
  if (barrier == nullptr) return copy(batch, cut, max_blocks, stream);
  return copy(AfterBarrier<Batch>{batch, *barrier}, cut, max_blocks, stream);
}

}  // namespace
}  // namespace flex_model

extern "C" int flex_model_copy_small(const flex_model::SmallBatch* batch, flex_model::Cut cut,
                                     uint32_t max_blocks, const flex_model::Barrier* barrier,
                                     void* stream) {
  return flex_model::copy(*batch, cut, max_blocks, barrier, stream);
}

extern "C" int flex_model_copy_large(const flex_model::LargeBatch* batch, flex_model::Cut cut,
                                     uint32_t max_blocks, const flex_model::Barrier* barrier,
                                     void* stream) {
  return flex_model::copy(*batch, cut, max_blocks, barrier, stream);
}

extern "C" const char* flex_model_cuda_error(int error) {
  cudaGetLastError();  // clears the error, which the next launch would report otherwise
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
