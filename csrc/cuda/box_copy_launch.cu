// Launches of the strided copies.
#include <algorithm>

#include "cuda/box_copy_kernels.cuh"
#include "cuda/gpu.cuh"
#include "cuda/launch.h"

namespace flex_model {
namespace {

template <typename Batch>
cudaError_t copy(const Batch& batch, const Cut& cut, uint32_t max_blocks, void* stream) {
  const uint32_t blocks =
      max_blocks == 0 ? batch.num_blocks : std::min(max_blocks, batch.num_blocks);
  const auto start = [&](auto kernel) {
    return launch(kernel, blocks, kThreads, static_cast<cudaStream_t>(stream), batch);
  };
  if (cut.windows) {
    switch (cut.unit) {
      case 4: return start(copy_windows<uint32_t, Batch>);
      case 2: return start(copy_windows<uint16_t, Batch>);
      case 1: return start(copy_windows<uint8_t, Batch>);
    }
    return cudaErrorInvalidValue;
  }
  switch (cut.unit) {
    case 16: return start(copy_chunks<uint4, Batch>);
    case 8: return start(copy_chunks<uint2, Batch>);
    case 4: return start(copy_chunks<unsigned int, Batch>);
    case 2: return start(copy_chunks<unsigned short, Batch>);
    case 1: return start(copy_chunks<unsigned char, Batch>);
  }
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace flex_model

extern "C" int flex_model_copy_small(const flex_model::SmallBatch* batch, flex_model::Cut cut,
                                     uint32_t max_blocks, void* stream) {
  return flex_model::copy(*batch, cut, max_blocks, stream);
}

extern "C" int flex_model_copy_large(const flex_model::LargeBatch* batch, flex_model::Cut cut,
                                     uint32_t max_blocks, void* stream) {
  return flex_model::copy(*batch, cut, max_blocks, stream);
}

extern "C" const char* flex_model_cuda_error(int error) {
  cudaGetLastError();  // clears the error, which the next launch would report otherwise
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
