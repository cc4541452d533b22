// How a shard gets from a GPU into a full tensor in page-locked host memory: by the copy engine, in
// copies of rows with a pitch, or by a kernel that writes to the host. Host code, free of CUDA.
//
// The copy engine needs no multiprocessor, so a model computes on undisturbed; but it moves a row
// at a time, which short rows make slow, and each copy is a call. So it gets boxes of long rows and
// few copies, and a kernel of few blocks, which writes whole bus transactions, the rest.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/copy_plan.h"
#include "cuda/launch.h"

namespace flex_model {

constexpr int64_t kMaxPitch = (int64_t{1} << 31) - 1;  // of every CUDA device
constexpr int64_t kMaxRowCopies = 64;                  // of one box
constexpr int64_t kMinRowBytes = 512;                  // chosen, not measured
constexpr uint32_t kHostBlocks = 32;  // 128 threads with 64 bytes each: 256 KB on their way

// Appends the copies of rows that make `transfer`; false if it can't be made of at most
// `max_copies`.
inline bool append_row_copies(const Transfer& transfer, int64_t max_copies,
                              std::vector<RowCopy>* copies) {
  size_t inner = 0;  // steps that one copy makes
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

// Whether the copy engine is to make it.
inline bool suits_copy_engine(const Transfer& transfer) {
  std::vector<RowCopy> copies;
  return (transfer.steps.empty() || transfer.run_bytes >= kMinRowBytes) &&
         append_row_copies(transfer, kMaxRowCopies, &copies);
}

}  // namespace flex_model
