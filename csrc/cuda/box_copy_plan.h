// Converts the boxes of plans to batches of copies for the kernel. Host code without CUDA or torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "boxes/boxes.h"
#include "cuda/box_copy_batch.h"

namespace flex_model {

// The copy of one box, in bytes, with its own addresses: `from` and `to` may belong to different
// ranks, tensors or devices.
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

// A window costs two wide loads, so chunks are better if they have 8 bytes or more, or if most
// windows of a run would be parts.
inline Cut cut_of(int chunk_bytes, int64_t run_bytes) {
  constexpr int64_t kMinRunBytes = 2 * kWindowBytes;
  return {chunk_bytes, chunk_bytes < 8 && run_bytes >= kMinRunBytes};
}

// The most pieces that a run takes; the number of windows depends on where the run begins.
inline int64_t num_pieces_of(const Cut& cut, int64_t run_bytes) {
  return cut.windows ? (run_bytes + 2 * (kWindowBytes - 1)) / kWindowBytes : run_bytes / cut.unit;
}

// Appends `transfer` as copies whose counts fit the kernel: of at most `max_pieces` pieces (3 or
// more, below 2^31) and kMaxLevels levels. A larger one is cut along its outermost level, or along
// the run.
inline void append_copies(const Transfer& transfer, const Cut& cut, int64_t max_pieces,
                          std::vector<Copy>* copies) {
  if (transfer.steps.empty()) {
    const int64_t longest =
        cut.windows ? (max_pieces - 2) * kWindowBytes : max_pieces * int64_t{cut.unit};
    for (int64_t at = 0; at < transfer.run_bytes; at += longest) {
      Copy copy{};
      copy.from = transfer.from + at;
      copy.to = transfer.to + at;
      copy.run_bytes = std::min(longest, transfer.run_bytes - at);
      copy.num_pieces = static_cast<uint32_t>(num_pieces_of(cut, copy.run_bytes));
      copy.run = Divisor::of(copy.num_pieces);
      for (Divisor& count : copy.counts) count = Divisor::of(1);
      copies->push_back(copy);
    }
    return;
  }
  const Transfer::Step outermost = transfer.steps.back();
  // Pieces below the outermost level; exact unless it exceeds max_pieces.
  int64_t inner = num_pieces_of(cut, transfer.run_bytes);
  for (size_t l = 0; l + 1 < transfer.steps.size() && inner <= max_pieces; ++l) {
    inner *= std::min<int64_t>(transfer.steps[l].count, std::numeric_limits<int32_t>::max());
  }
  const bool fits = transfer.steps.size() <= kMaxLevels && inner <= max_pieces;
  const int64_t per_copy = fits ? max_pieces / inner : 1;
  for (int64_t at = 0; at < outermost.count; at += per_copy) {
    Transfer part = transfer;
    part.from += at * outermost.from_stride;
    part.to += at * outermost.to_stride;
    if (!fits) {
      part.steps.pop_back();
      append_copies(part, cut, max_pieces, copies);
      continue;
    }
    part.steps.back().count = std::min(per_copy, outermost.count - at);
    Copy copy{};
    copy.from = part.from;
    copy.to = part.to;
    copy.run_bytes = part.run_bytes;
    copy.run = Divisor::of(static_cast<uint32_t>(num_pieces_of(cut, part.run_bytes)));
    copy.num_pieces = static_cast<uint32_t>(inner * part.steps.back().count);
    part.steps.resize(kMaxLevels, {1, 0, 0});
    for (int l = 0; l < kMaxLevels; ++l) {
      copy.from_strides[l] = part.steps[l].from_stride;
      copy.to_strides[l] = part.steps[l].to_stride;
      if (l + 1 < kMaxLevels) {
        copy.counts[l] = Divisor::of(static_cast<uint32_t>(part.steps[l].count));
      }
    }
    copies->push_back(copy);
  }
}

// The copies of an op, in as few launches as their cuts allow.
class CopyPlan {
 public:
  void add(const Box& box, Direction direction, const char* from, char* to) {
    if (num_bytes(box) == 0) return;
    num_bytes_ += num_bytes(box);
    transfers_.push_back(transfer_of(box, direction, from, to));
    const Transfer& transfer = transfers_.back();
    cuts_.push_back(cut_of(chunk_bytes_of(transfer), transfer.run_bytes));
  }

  bool empty() const { return transfers_.empty(); }

  // Calls `launch(batch, cut)` for each SmallBatch or LargeBatch; stops at and returns the first
  // result that is not 0.
  template <typename Launch>
  int for_each_batch(Launch launch) {
    if (num_bytes_ <= kSmallBytes) unite_cuts();
    constexpr Cut kCuts[] = {{16, false}, {8, false}, {4, true}, {4, false},
                             {2, true},   {2, false}, {1, true}, {1, false}};
    std::vector<Copy> copies;
    for (const Cut& cut : kCuts) {
      copies.clear();
      for (size_t i = 0; i < transfers_.size(); ++i) {
        if (cuts_[i].unit != cut.unit || cuts_[i].windows != cut.windows) continue;
        append_copies(transfers_[i], cut, kMaxPieces, &copies);
      }
      for (size_t at = 0; at < copies.size();) {
        const int error = copies.size() - at <= kCapacity<SmallBatch>
                              ? launch_some<SmallBatch>(copies, &at, cut, launch)
                              : launch_some<LargeBatch>(copies, &at, cut, launch);
        if (error) return error;
      }
    }
    return 0;
  }

 private:
  // The blocks of a batch must be fewer than 2^31: 240 copies of 2^30 pieces are 503 million.
  static constexpr int64_t kMaxPieces = int64_t{1} << 30;
  // Below this, a launch costs more than narrow loads do.
  static constexpr int64_t kSmallBytes = int64_t{1} << 20;

  template <typename Batch>
  static constexpr size_t kCapacity = sizeof(Batch::copies) / sizeof(Copy);

  template <typename Batch, typename Launch>
  int launch_some(const std::vector<Copy>& copies, size_t* at, const Cut& cut, Launch launch) {
    Batch batch;
    const size_t count = std::min(kCapacity<Batch>, copies.size() - *at);
    std::copy_n(copies.begin() + *at, count, batch.copies);
    batch.arrange(static_cast<uint32_t>(count));
    batch.num_bytes = num_bytes_;
    *at += count;
    return launch(batch, cut);
  }

  // Replaces the cuts by one that suits all copies, so that there is one launch.
  void unite_cuts() {
    Cut united{16, true};
    for (size_t i = 0; i < cuts_.size(); ++i) {
      united.unit = std::min(united.unit, cuts_[i].unit);
      united.windows = united.windows && cut_of(1, transfers_[i].run_bytes).windows;
    }
    united.windows = united.windows && cut_of(united.unit, transfers_[0].run_bytes).windows;
    std::fill(cuts_.begin(), cuts_.end(), united);
  }

  int64_t num_bytes_ = 0;
  std::vector<Transfer> transfers_;
  std::vector<Cut> cuts_;  // by transfer
};

}  // namespace flex_model
