// From the boxes of a plan to batches of copies for the kernel. Host code, free of CUDA and torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "boxes/boxes.h"
#include "cuda/box_copy.h"

namespace flex_model {

// Copies of one box, in bytes and between addresses of its own: `from` and `to` may be of different
// ranks.
struct Transfer {
  const char* from;
  char* to;
  int64_t run_bytes;
  struct Step {
    int64_t count, from_stride, to_stride;
  };
  std::vector<Step> steps;  // innermost first
};

enum class Direction { kToFull, kToShard };

inline Transfer transfer_of(const Box& box, Direction direction, const char* from, char* to) {
  const bool to_full = direction == Direction::kToFull;
  Transfer transfer{from + (to_full ? box.shard_offset : box.full_offset),
                    to + (to_full ? box.full_offset : box.shard_offset),
                    box.run_bytes,
                    {}};
  for (size_t l = box.levels.size(); l-- > 0;) {
    const Level& level = box.levels[l];
    if (level.count == 1) continue;
    transfer.steps.push_back({level.count, to_full ? level.shard_stride : level.full_stride,
                              to_full ? level.full_stride : level.shard_stride});
  }
  return transfer;
}

// The widest chunk that divides addresses, strides and run, so that every access is aligned.
inline int chunk_bytes_of(const Transfer& transfer) {
  uint64_t bits = reinterpret_cast<uintptr_t>(transfer.from) |
                  reinterpret_cast<uintptr_t>(transfer.to) |
                  static_cast<uint64_t>(transfer.run_bytes);
  for (const Transfer::Step& step : transfer.steps) bits |= step.from_stride | step.to_stride;
  int chunk = 16;
  while (bits % chunk != 0) chunk /= 2;
  return chunk;
}

// Appends `transfer` as copies whose counts fit the kernel: of at most `max_chunks` chunks (below
// 2^31) and kMaxLevels levels. A larger one is cut along its outermost level, or along the run.
inline void append_copies(const Transfer& transfer, int chunk_bytes, int64_t max_chunks,
                          std::vector<Copy>* copies) {
  int64_t inner = transfer.run_bytes / chunk_bytes;  // chunks below the outermost level
  if (transfer.steps.empty()) {
    for (int64_t at = 0; at < inner; at += max_chunks) {
      const uint32_t chunks = static_cast<uint32_t>(std::min(max_chunks, inner - at));
      copies->push_back({transfer.from + at * chunk_bytes,
                         transfer.to + at * chunk_bytes,
                         {},
                         {},
                         Divisor::of(chunks),
                         {},
                         chunks,
                         0});
    }
    return;
  }
  const Transfer::Step outermost = transfer.steps.back();
  for (size_t l = 0; l + 1 < transfer.steps.size(); ++l) inner *= transfer.steps[l].count;
  const bool fits = transfer.steps.size() <= kMaxLevels && inner <= max_chunks;
  const int64_t per_copy = fits ? max_chunks / inner : 1;
  for (int64_t at = 0; at < outermost.count; at += per_copy) {
    Transfer part = transfer;
    part.from += at * outermost.from_stride;
    part.to += at * outermost.to_stride;
    if (!fits) {
      part.steps.pop_back();
      append_copies(part, chunk_bytes, max_chunks, copies);
      continue;
    }
    part.steps.back().count = std::min(per_copy, outermost.count - at);
    Copy copy{part.from,
              part.to,
              {},
              {},
              Divisor::of(static_cast<uint32_t>(part.run_bytes / chunk_bytes)),
              {},
              static_cast<uint32_t>(inner * part.steps.back().count),
              static_cast<int32_t>(part.steps.size())};
    for (size_t l = 0; l < part.steps.size(); ++l) {
      copy.from_strides[l] = part.steps[l].from_stride;
      copy.to_strides[l] = part.steps[l].to_stride;
      copy.counts[l] = Divisor::of(static_cast<uint32_t>(part.steps[l].count));
    }
    copies->push_back(copy);
  }
}

// All copies of a plan, by the chunk that they can be made with.
class CopyPlan {
 public:
  void add(const Box& box, Direction direction, const char* from, char* to) {
    if (num_bytes(box) == 0) return;
    const Transfer transfer = transfer_of(box, direction, from, to);
    const int chunk_bytes = chunk_bytes_of(transfer);
    append_copies(transfer, chunk_bytes, kMaxChunks, &copies_[chunk_bytes]);
  }

  // Calls `launch(batch, chunk_bytes)` for each batch; stops at and returns the first result that
  // is not 0.
  template <typename Launch>
  int for_each_batch(Launch launch) const {
    for (const auto& [chunk_bytes, copies] : copies_) {
      for (size_t at = 0; at < copies.size(); at += kMaxCopies) {
        CopyBatch batch{};
        batch.num_copies = static_cast<int32_t>(std::min<size_t>(kMaxCopies, copies.size() - at));
        std::copy_n(copies.begin() + at, batch.num_copies, batch.copies);
        if (const int error = launch(batch, chunk_bytes)) return error;
      }
    }
    return 0;
  }

 private:
  // A launch must not make the kernel's chunk number, rounded up to whole blocks, pass 2^31.
  static constexpr int64_t kMaxChunks = int64_t{1} << 30;
  std::map<int, std::vector<Copy>> copies_;
};

}  // namespace flex_model
