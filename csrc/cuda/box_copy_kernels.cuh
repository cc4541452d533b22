// Strided copies, several boxes in one launch. Bytes are only moved, so any dtype works.
//
// A block copies one tile of one copy: kUnroll pieces per thread, a block's width apart, so that
// neighbouring threads touch neighbouring bytes. All loads of a thread are in flight before its
// first store. Data is not needed again soon (streaming hints), except for the bytes that two
// windows share.
//
// Threads share nothing.
#pragma once

#include <cuda_runtime.h>

#include "cuda/box_copy_batch.h"

namespace flex_model {
namespace {

template <typename Chunk, typename Batch>
__global__ __launch_bounds__(kThreads) void copy_chunks(const __grid_constant__ Batch batch) {
  for (uint32_t block = blockIdx.x; block < batch.num_blocks; block += gridDim.x) {
    uint32_t tile;
    const Copy& copy = batch.copies[batch.find_tile(block, &tile)];
    const uint32_t first = tile * kTile + threadIdx.x, num_pieces = copy.num_pieces;
    Chunk chunks[kUnroll];
    char* targets[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const uint32_t i = first + k * kThreads;
      if (i < num_pieces) {
        const char* source;
        copy.find_chunk(i, sizeof(Chunk), &source, &targets[k]);
        chunks[k] = __ldcs(reinterpret_cast<const Chunk*>(source));
      }
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (first + k * kThreads < num_pieces)
        __stcs(reinterpret_cast<Chunk*>(targets[k]), chunks[k]);
    }
  }
}

__device__ __forceinline__ Words as_words(const uint4& vector) {
  return {{vector.x, vector.y, vector.z, vector.w}};
}

// Stores a window that its run does not fill.
template <typename Unit>
__device__ __forceinline__ void store_part(const Window& window, const Words& words) {
#pragma unroll
  for (int at = 0; at < kWindowBytes; at += static_cast<int>(sizeof(Unit))) {
    if (at >= window.begin && at < window.end) {
      const uint32_t bits = words.word[at / 4] >> (at % 4 * 8);
      *reinterpret_cast<Unit*>(window.to + at) = static_cast<Unit>(bits);
    }
  }
}

template <typename Unit, typename Batch>
__global__ __launch_bounds__(kThreads) void copy_windows(const __grid_constant__ Batch batch) {
  for (uint32_t block = blockIdx.x; block < batch.num_blocks; block += gridDim.x) {
    uint32_t tile;
    const Copy& copy = batch.copies[batch.find_tile(block, &tile)];
    const uint32_t first = tile * kTile + threadIdx.x, num_pieces = copy.num_pieces;
    uint4 low[kUnroll], high[kUnroll];
    Window windows[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const uint32_t i = first + k * kThreads;
      windows[k] = {nullptr, nullptr, 0, 0};
      low[k] = high[k] = make_uint4(0, 0, 0, 0);
      if (i < num_pieces) {
        windows[k] = copy.find_window(i);
        const auto* aligned = reinterpret_cast<const uint4*>(windows[k].from - windows[k].shift());
        if (windows[k].needs_low()) low[k] = aligned[0];
        if (windows[k].needs_high()) high[k] = aligned[1];
      }
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const Words words = shifted(as_words(low[k]), as_words(high[k]), windows[k].shift());
      if (windows[k].is_whole()) {
        __stcs(reinterpret_cast<uint4*>(windows[k].to),
               make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]));
      } else {
        store_part<Unit>(windows[k], words);
      }
    }
  }
}

}  // namespace
}  // namespace flex_model
