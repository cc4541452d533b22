// Copies of a shard from a GPU into a full tensor in page-locked host memory: by the copy engine,
// in copies of rows with a pitch, or by a kernel that writes to the host. Host code without CUDA.
//
// The copy engine needs no multiprocessor, so it does not slow down the model; but it moves a row
// at a time, which is slow for short rows, and each copy is a call. So it copies boxes of long rows
// that need few copies, and a kernel of few blocks, which writes whole bus transactions, the rest.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/box_copy_plan.h"
#include "cuda/launch.h"

namespace flex_model {

constexpr int64_t kMaxPitch = (int64_t{1} << 31) - 1;  // the limit of every CUDA device
constexpr int64_t kMaxRowCopies = 64;                  // per box
// On an H100 (benchmarks/results/gpu_h100_80gb_hbm3.json, "offload") the copy engine moves rows of
// 256 bytes at 53.1 GB/s, the kernel at 50.8; rows of 64 bytes at 43.6 and 43.3, which is no reason
// for either. Nothing was measured between.
constexpr int64_t kMinRowBytes = 256;
constexpr uint32_t kHostBlocks = 32;  // 128 threads with 64 bytes each: 256 KB in flight

// Appends the copies of rows that make up `transfer`; false if it needs more than `max_copies`.
inline bool append_row_copies(const Transfer& transfer, int64_t max_copies,
                              std::vector<RowCopy>* copies) {
  size_t inner = 0;  // steps of one copy
  RowCopy rows{transfer.from, transfer.to, transfer.run_bytes, 1, 0, 0};
  if (!transfer.steps.empty()) {
    const Transfer::Step& step = transfer.steps[0];
    const auto is_pitch = [&](int64_t stride) {
      return stride >= transfer.run_bytes && stride <= kMaxPitch;
    };
    if (is_pitch(step.from_stride) && is_pitch(step.to_stride)) {
      inner = 1;
      rows.num_rows = step.count;
      rows.from_pitch = step.from_stride;
      rows.to_pitch = step.to_stride;
    }
  }
  int64_t count = 1;
  for (size_t s = inner; s < transfer.steps.size(); ++s) {
    if (transfer.steps[s].count > max_copies / count) return false;
    count *= transfer.steps[s].count;
  }
  for (int64_t i = 0; i < count; ++i) {
    RowCopy copy = rows;
    int64_t left = i;
    for (size_t s = inner; s < transfer.steps.size(); ++s) {
      const Transfer::Step& step = transfer.steps[s];
      copy.from += left % step.count * step.from_stride;
      copy.to += left % step.count * step.to_stride;
      left /= step.count;
    }
    copies->push_back(copy);
  }
  return true;
}

// Whether the copy engine should make the transfer.
inline bool suits_copy_engine(const Transfer& transfer) {
  std::vector<RowCopy> copies;
  return (transfer.steps.empty() || transfer.run_bytes >= kMinRowBytes) &&
         append_row_copies(transfer, kMaxRowCopies, &copies);
}

}  // namespace flex_model
