// A batch of strided copies as the kernel's parameter, and the index maths of that kernel.
//
// Without CUDA or torch: the same code runs in the kernels (box_copy_kernels.cuh) and on the CPU. A
// run is cut in one of two ways:
//
//   chunks    of 1, 2, 4, 8 or 16 bytes that divide addresses, strides and the run: each is one
//             load and one store
//   windows   the aligned 16 bytes of the target that the run touches, loaded by two aligned wide
//             loads. A whole window is one wide store; the first and the last may be parts, stored
//             in units of 1, 2 or 4 bytes. For runs whose two sides are aligned differently
//
// Every count fits 31 bits, so that one multiplication replaces each division.
#pragma once

#include <cstdint>

#include "cuda/divisor.h"

namespace flex_model {

constexpr int kMaxLevels = 3;  // above the run; boxes with more are cut by the host
constexpr int kWindowBytes = 16;
constexpr int kThreads = 128;   // of a block
constexpr int kUnroll = 4;      // pieces of a thread: its loads are all in flight before it stores
constexpr uint32_t kWarp = 32;  // threads, whose pieces lie side by side
constexpr uint32_t kTile = kThreads * kUnroll;  // pieces of a block

// How the runs of a batch are cut: into chunks of `unit` bytes, or windows with parts of `unit`.
struct Cut {
  int32_t unit;
  bool windows;
};

// Sixteen bytes in order, as a wide load reads them.
struct Words {
  uint32_t word[4];
};

// The bytes from `shift` (below 16) on of `low` followed by `high`.
FLEX_MODEL_HOST_DEVICE Words shifted(const Words& low, const Words& high, uint32_t shift) {
  // Uses selections: an index that the compiler can't resolve would spill the words.
  const bool by_two = shift & 8, by_one = shift & 4;
  const uint32_t a0 = by_two ? low.word[2] : low.word[0], a1 = by_two ? low.word[3] : low.word[1];
  const uint32_t a2 = by_two ? high.word[0] : low.word[2], a3 = by_two ? high.word[1] : low.word[3];
  const uint32_t a4 = by_two ? high.word[2] : high.word[0],
                 a5 = by_two ? high.word[3] : high.word[1];
  const uint32_t b0 = by_one ? a1 : a0, b1 = by_one ? a2 : a1, b2 = by_one ? a3 : a2;
  const uint32_t b3 = by_one ? a4 : a3, b4 = by_one ? a5 : a4;
  const uint32_t bits = (shift & 3) * 8;
#ifdef __CUDA_ARCH__
  return {{__funnelshift_r(b0, b1, bits), __funnelshift_r(b1, b2, bits),
           __funnelshift_r(b2, b3, bits), __funnelshift_r(b3, b4, bits)}};
#else
  const auto joined = [bits](uint32_t first, uint32_t second) {
    return static_cast<uint32_t>((uint64_t{second} << 32 | first) >> bits);
  };
  return {{joined(b0, b1), joined(b1, b2), joined(b2, b3), joined(b3, b4)}};
#endif
}

// Part of a run: bytes [begin, end) of the 16 at `to`, which is a multiple of 16, from the same
// bytes at `from`. Empty (`end` <= `begin`) beyond the run.
struct Window {
  const char* from;
  char* to;
  int32_t begin;
  int32_t end;

  FLEX_MODEL_HOST_DEVICE bool is_whole() const { return begin == 0 && end == kWindowBytes; }

  // The bytes are in the aligned 16 at `from - shift()` and in the 16 after them. Only an aligned
  // 16 with some of them may be loaded: then the load stays inside the memory of the run.
  FLEX_MODEL_HOST_DEVICE int32_t shift() const {
    return static_cast<int32_t>(reinterpret_cast<uintptr_t>(from) % kWindowBytes);
  }
  FLEX_MODEL_HOST_DEVICE bool needs_low() const {
    return begin < end && begin + shift() < kWindowBytes;
  }
  FLEX_MODEL_HOST_DEVICE bool needs_high() const {
    return begin < end && shift() + end > kWindowBytes;
  }
};

// Where a piece is: its run, on both sides, and the pieces of the run before it.
struct Place {
  const char* from;
  char* to;
  uint32_t in_run;
  uint32_t runs_left;  // until the innermost level ends
};

// One box: runs of `run` pieces (chunks or windows), repeated by the levels, innermost first: a
// level that is not needed has one step. Strides are in bytes.
struct Copy {
  const char* from;
  char* to;
  int64_t run_bytes;
  int64_t from_strides[kMaxLevels];
  int64_t to_strides[kMaxLevels];
  Divisor run;
  Divisor counts[kMaxLevels - 1];  // the outermost level needs none: the rest is its index
  uint32_t num_pieces;

  // Computes the place of piece `i`, by divisions.
  FLEX_MODEL_HOST_DEVICE Place place_of(uint32_t i) const {
    const uint32_t number = run.quotient(i);
    const uint32_t inner = counts[0].quotient(number), outer = counts[1].quotient(inner);
    const uint32_t index[] = {number - inner * counts[0].value, inner - outer * counts[1].value,
                              outer};
    Place place{from, to, i - number * run.value, counts[0].value - 1 - index[0]};
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int level = 0; level < kMaxLevels; ++level) {
      place.from += index[level] * from_strides[level];
      place.to += index[level] * to_strides[level];
    }
    return place;
  }

  // Moves `place` on by kWarp pieces, to piece `i`. Within a run of kWarp pieces or more, and from
  // it to the next one, that takes no division.
  FLEX_MODEL_HOST_DEVICE void advance(uint32_t i, Place* place) const {
    place->in_run += kWarp;
    if (place->in_run < run.value) return;
    place->in_run -= run.value;
    if (place->in_run < run.value && place->runs_left > 0) {
      --place->runs_left;
      place->from += from_strides[0];
      place->to += to_strides[0];
    } else {
      *place = place_of(i);
    }
  }

  FLEX_MODEL_HOST_DEVICE Window window_at(const Place& place) const {
    const int32_t skew = static_cast<int32_t>(reinterpret_cast<uintptr_t>(place.to) % kWindowBytes);
    const int64_t at = static_cast<int64_t>(place.in_run) * kWindowBytes - skew;
    const int64_t left = run_bytes - at;
    return {place.from + at, place.to + at, place.in_run == 0 ? skew : 0,
            left < kWindowBytes ? static_cast<int32_t>(left) : kWindowBytes};
  }
};

// The copies of one launch. Blocks take tiles of the copies in turns, so that runs which
// interleave in the full tensor are written at about the same time; copies with more tiles than the
// smallest one finish one after the other.
template <int kCapacity>
struct CopyBatch {
  Copy copies[kCapacity];
  uint32_t ends[kCapacity];  // by copy: the end of its blocks after the turns
  Divisor num_copies;
  uint32_t num_turns;
  uint32_t num_blocks;  // if each had one tile; a block of a smaller grid takes several
  int64_t num_bytes;    // of the op, with its other batches

  // Computes the other fields but `num_bytes` from copies[0] to copies[count - 1].
  void arrange(uint32_t count) {
    num_turns = ~uint32_t{0};
    for (uint32_t c = 0; c < count; ++c) {
      const uint32_t tiles = num_tiles(copies[c]);
      num_turns = tiles < num_turns ? tiles : num_turns;
    }
    uint32_t end = 0;
    for (uint32_t c = 0; c < count; ++c) ends[c] = end += num_tiles(copies[c]) - num_turns;
    num_copies = Divisor::of(count);
    num_blocks = num_turns * count + end;
  }

  static uint32_t num_tiles(const Copy& copy) { return (copy.num_pieces + kTile - 1) / kTile; }

  // Returns the copy of block `block`, and sets its tile.
  FLEX_MODEL_HOST_DEVICE uint32_t find_tile(uint32_t block, uint32_t* tile) const {
    const uint32_t turn = num_copies.quotient(block);
    if (turn < num_turns) {
      *tile = turn;
      return block - turn * num_copies.value;
    }
    const uint32_t rest = block - num_turns * num_copies.value;
    uint32_t low = 0, high = num_copies.value - 1;
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      if (rest < ends[middle]) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    *tile = num_turns + rest - (low == 0 ? 0 : ends[low - 1]);
    return low;
  }
};

// A batch is the kernel's parameter, which the launch copies: SmallBatch for a tensor of a few
// ranks, LargeBatch for many tensors in one launch.
using SmallBatch = CopyBatch<16>;
using LargeBatch = CopyBatch<240>;

static_assert(sizeof(SmallBatch) <= 4096, "the limit of every CUDA version");
static_assert(sizeof(LargeBatch) <= 32764, "the limit since CUDA 12.1");

}  // namespace flex_model
