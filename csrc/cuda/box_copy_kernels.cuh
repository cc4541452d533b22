// Strided copies, several boxes in one launch. Bytes are only moved, so any dtype works.
//
// A block copies tiles, each of one copy: kUnroll pieces per thread, a warp's width apart, so that
// neighbouring threads touch neighbouring bytes. All loads of a thread are in flight before its
// first store. `kStreams`: the data is more than the L2 cache holds, so it is marked to be evicted
// first; but not what windows load, since neighbours share it.
//
// Threads share nothing, but the barrier that comes before copies from the memory of peers.
#pragma once

#include <cuda_runtime.h>

#include "cuda/barrier.cuh"
#include "cuda/box_copy_batch.h"

namespace flex_model {
namespace {

// Blocks that a multiprocessor runs at once: as many as the registers of a thread allow.
constexpr int kChunkBlocks = 12, kWindowBlocks = 7;

// A batch whose copies begin after a barrier of ranks.
template <typename Batch>
struct AfterBarrier : Batch {
  Barrier barrier;
};

static_assert(kMaxPeers <= kThreads, "a thread waits for one peer");
static_assert(sizeof(AfterBarrier<LargeBatch>) <= 32764, "the limit since CUDA 12.1");

template <int kCapacity>
__device__ __forceinline__ void begin(const CopyBatch<kCapacity>&) {}

template <typename Batch>
__device__ __forceinline__ void begin(const AfterBarrier<Batch>& batch) {
  wait_for_peers(batch.barrier);
}

// The first of a thread's kUnroll pieces in a tile; the others follow, kWarp apart.
__device__ __forceinline__ uint32_t first_piece(uint32_t tile) {
  return tile * kTile + threadIdx.x / kWarp * (kUnroll * kWarp) + threadIdx.x % kWarp;
}

template <bool kStreams, typename Value>
__device__ __forceinline__ Value load(const Value* address) {
  return kStreams ? __ldcs(address) : *address;
}

template <bool kStreams, typename Value>
__device__ __forceinline__ void store(Value* address, Value value) {
  if (kStreams) {
    __stcs(address, value);
  } else {
    *address = value;
  }
}

template <typename Chunk, bool kStreams, typename Batch>
__device__ __forceinline__ void copy_by_chunks(const Batch& batch) {
  for (uint32_t block = blockIdx.x; block < batch.num_blocks; block += gridDim.x) {
    uint32_t tile;
    const Copy& copy = batch.copies[batch.find_tile(block, &tile)];
    const uint32_t first = first_piece(tile), num_pieces = copy.num_pieces;
    Place place = copy.place_of(first);
    Chunk chunks[kUnroll];
    char* targets[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const uint32_t i = first + k * kWarp;
      if (k > 0) copy.advance(i, &place);
      const uint64_t at = uint64_t{place.in_run} * sizeof(Chunk);
      targets[k] = place.to + at;
      if (i < num_pieces)
        chunks[k] = load<kStreams>(reinterpret_cast<const Chunk*>(place.from + at));
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (first + k * kWarp < num_pieces)
        store<kStreams>(reinterpret_cast<Chunk*>(targets[k]), chunks[k]);
    }
  }
}

template <typename Chunk, bool kStreams, typename Batch>
__global__ __launch_bounds__(kThreads,
                             kChunkBlocks) void copy_chunks(const __grid_constant__ Batch batch) {
  begin(batch);
  copy_by_chunks<Chunk, kStreams>(batch);
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

template <typename Unit, bool kStreams, typename Batch>
__device__ __forceinline__ void copy_by_windows(const Batch& batch) {
  for (uint32_t block = blockIdx.x; block < batch.num_blocks; block += gridDim.x) {
    uint32_t tile;
    const Copy& copy = batch.copies[batch.find_tile(block, &tile)];
    const uint32_t first = first_piece(tile), num_pieces = copy.num_pieces;
    Place place = copy.place_of(first);
    uint4 low[kUnroll], high[kUnroll];
    Window windows[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const uint32_t i = first + k * kWarp;
      if (k > 0) copy.advance(i, &place);
      windows[k] = {nullptr, nullptr, 0, 0};
      low[k] = high[k] = make_uint4(0, 0, 0, 0);
      if (i < num_pieces) {
        windows[k] = copy.window_at(place);
        const auto* aligned = reinterpret_cast<const uint4*>(windows[k].from - windows[k].shift());
        if (windows[k].needs_low()) low[k] = aligned[0];
        if (windows[k].needs_high()) high[k] = aligned[1];
      }
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const Words words = shifted(as_words(low[k]), as_words(high[k]), windows[k].shift());
      if (windows[k].is_whole()) {
        store<kStreams>(reinterpret_cast<uint4*>(windows[k].to),
                        make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]));
      } else {
        store_part<Unit>(windows[k], words);
      }
    }
  }
}

template <typename Unit, bool kStreams, typename Batch>
__global__ __launch_bounds__(kThreads,
                             kWindowBlocks) void copy_windows(const __grid_constant__ Batch batch) {
  begin(batch);
  copy_by_windows<Unit, kStreams>(batch);
}

}  // namespace
}  // namespace flex_model
