// Strided boxes: where the bytes of each rank's shard are in the full tensor, and the copies that
// follow them. Header-only, without Python or torch: _C plans with it, _ops copies with it on CPU,
// _cuda reads the same plan.
//
//   shard  what one rank holds, contiguous
//   full   the unsharded tensor, contiguous
//
// All offsets, strides and counts of bytes are in bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "boxes/streaming.h"

namespace flex_model {

// One loop of a strided copy: `count` steps, each moving on by these strides.
struct Level {
  int64_t count;
  int64_t full_stride;
  int64_t shard_stride;
};

// A rectangular part of one rank's shard, counted in bytes: runs of `run_bytes` contiguous bytes on
// both sides, repeated by the levels (outermost first).
struct Box {
  int64_t rank;
  int64_t full_offset;
  int64_t shard_offset;
  int64_t run_bytes;
  std::vector<Level> levels;
};

// Bytes that a copy along `box` moves; the largest int64 on overflow.
inline int64_t num_bytes(const Box& box) {
  int64_t bytes = box.run_bytes;
  bool overflow = false;
  for (const Level& level : box.levels) {
    if (level.count == 0) return 0;
    overflow = __builtin_mul_overflow(bytes, level.count, &bytes) || overflow;
  }
  return overflow ? std::numeric_limits<int64_t>::max() : bytes;
}

// The boxes of all ranks, as ops receive them (`int[]`):
//   num_ranks, full_bytes, shard_bytes[num_ranks], num_boxes,
//   then per box: rank, full_offset, shard_offset, run_bytes, num_levels, (count, full_stride,
//   shard_stride) * num_levels
struct BoxPlan {
  int64_t full_bytes = 0;
  std::vector<int64_t> shard_bytes;  // per rank
  std::vector<Box> boxes;            // in rank order

  std::vector<int64_t> encode() const {
    std::vector<int64_t> code{static_cast<int64_t>(shard_bytes.size()), full_bytes};
    code.insert(code.end(), shard_bytes.begin(), shard_bytes.end());
    code.push_back(static_cast<int64_t>(boxes.size()));
    for (const Box& box : boxes) {
      code.insert(code.end(), {box.rank, box.full_offset, box.shard_offset, box.run_bytes,
                               static_cast<int64_t>(box.levels.size())});
      for (const Level& level : box.levels) {
        code.insert(code.end(), {level.count, level.full_stride, level.shard_stride});
      }
    }
    return code;
  }

  // std::invalid_argument if the code is cut short, too long, or points outside of the buffers it
  // describes.
  static BoxPlan decode(const int64_t* code, int64_t size) {
    int64_t at = 0;
    const auto next = [&] {
      if (at >= size) throw std::invalid_argument("gather plan: the encoded plan is cut short");
      return code[at++];
    };
    const auto next_size = [&](const char* what) {
      const int64_t value = next();
      if (value < 0) throw std::invalid_argument(std::string("gather plan: negative ") + what);
      return value;
    };
    BoxPlan plan;
    const int64_t num_ranks = next_size("number of ranks");
    plan.full_bytes = next_size("size");
    for (int64_t rank = 0; rank < num_ranks; ++rank) plan.shard_bytes.push_back(next_size("size"));
    const int64_t num_boxes = next_size("number of boxes");
    for (int64_t i = 0; i < num_boxes; ++i) {
      Box box;
      box.rank = next_size("rank");
      box.full_offset = next_size("offset");
      box.shard_offset = next_size("offset");
      box.run_bytes = next_size("run");
      const int64_t num_levels = next_size("number of levels");
      for (int64_t l = 0; l < num_levels; ++l) {
        Level level;
        level.count = next_size("count");
        level.full_stride = next_size("stride");
        level.shard_stride = next_size("stride");
        box.levels.push_back(level);
      }
      plan.check(box);
      plan.boxes.push_back(std::move(box));
    }
    if (at != size) throw std::invalid_argument("gather plan: the encoded plan is too long");
    return plan;
  }

  // std::invalid_argument if a copy along `box` would leave its buffers.
  void check(const Box& box) const {
    if (box.rank >= static_cast<int64_t>(shard_bytes.size())) {
      throw std::invalid_argument("gather plan: a box names a rank that the plan does not have");
    }
    int64_t full_end = box.full_offset, shard_end = box.shard_offset;
    bool overflow = __builtin_add_overflow(full_end, box.run_bytes, &full_end) ||
                    __builtin_add_overflow(shard_end, box.run_bytes, &shard_end);
    for (const Level& level : box.levels) {
      if (level.count == 0) return;  // nothing is copied
      int64_t full_step, shard_step;
      overflow = overflow ||
                 __builtin_mul_overflow(level.count - 1, level.full_stride, &full_step) ||
                 __builtin_mul_overflow(level.count - 1, level.shard_stride, &shard_step) ||
                 __builtin_add_overflow(full_end, full_step, &full_end) ||
                 __builtin_add_overflow(shard_end, shard_step, &shard_end);
    }
    if (overflow || full_end > full_bytes || shard_end > shard_bytes[box.rank]) {
      throw std::invalid_argument("gather plan: a box leaves its buffer");
    }
    if (num_bytes(box) > shard_bytes[box.rank]) {
      throw std::invalid_argument("gather plan: a box copies more bytes than its shard has");
    }
  }
};

namespace detail {

// Copies of a few bytes, where a call of memcpy costs more than the copy.
template <int64_t kBytes>
struct Word {
  char bytes[kBytes];
};

// Copies runs one after the other. `Copy` moves one run; it is a type, so that the loop is compiled
// for each kind of run.
template <typename Copy>
void copy_runs(Copy copy, int64_t count, char* to, int64_t to_stride, const char* from,
               int64_t from_stride) {
  for (int64_t i = 0; i < count; ++i, to += to_stride, from += from_stride) copy(to, from);
}

template <int64_t kBytes>
struct CopyExactly {
  void operator()(char* to, const char* from) const { std::memcpy(to, from, kBytes); }
};

// From kBytes to twice that: the first and the last kBytes, which may overlap.
template <int64_t kBytes>
struct CopyTwice {
  int64_t bytes;
  void operator()(char* to, const char* from) const {
    Word<kBytes> first, last;
    std::memcpy(&first, from, kBytes);
    std::memcpy(&last, from + bytes - kBytes, kBytes);
    std::memcpy(to, &first, kBytes);
    std::memcpy(to + bytes - kBytes, &last, kBytes);
  }
};

struct CopyAny {
  int64_t bytes;
  void operator()(char* to, const char* from) const { std::memcpy(to, from, bytes); }
};

struct CopyPastCache {
  int64_t bytes;
  Others others;
  void operator()(char* to, const char* from) const { stream_to_each(to, others, from, bytes); }
};

constexpr int64_t kShortestStreamedRun = 256;

// How runs are written. PastCache streams runs of at least kShortestStreamedRun bytes, to the other
// targets too; shorter ones are written as by ThroughCache, to one target.
struct ThroughCache {};
struct PastCache {
  Others others;
};

// Copies the innermost level.
template <typename Stores>
void copy_level(Stores stores, int64_t bytes, int64_t count, char* to, int64_t to_stride,
                const char* from, int64_t from_stride) {
  const auto run = [&](auto copy) { copy_runs(copy, count, to, to_stride, from, from_stride); };
  if constexpr (std::is_same_v<Stores, PastCache>) {
    if (bytes >= kShortestStreamedRun) return run(CopyPastCache{bytes, stores.others});
  }
  switch (bytes) {
    case 1: return run(CopyExactly<1>{});
    case 2: return run(CopyExactly<2>{});
    case 4: return run(CopyExactly<4>{});
    case 8: return run(CopyExactly<8>{});
    case 16: return run(CopyExactly<16>{});
    case 32: return run(CopyExactly<32>{});
    case 64: return run(CopyExactly<64>{});
  }
  if (bytes > 128 || bytes == 3) return run(CopyAny{bytes});
  if (bytes > 64) return run(CopyTwice<64>{bytes});
  if (bytes > 32) return run(CopyTwice<32>{bytes});
  if (bytes > 16) return run(CopyTwice<16>{bytes});
  if (bytes > 8) return run(CopyTwice<8>{bytes});
  return run(CopyTwice<4>{bytes});
}

// Copies the levels from `level` to the innermost; of `level` only steps `begin` to `end`.
template <bool kToFull, typename Stores>
void copy_levels(Stores stores, const Level* level, const Level* innermost, int64_t begin,
                 int64_t end, int64_t run_bytes, char* full, char* shard) {
  full += begin * level->full_stride;
  shard += begin * level->shard_stride;
  if (level == innermost) {
    if (kToFull) {
      copy_level(stores, run_bytes, end - begin, full, level->full_stride, shard,
                 level->shard_stride);
    } else {
      copy_level(stores, run_bytes, end - begin, shard, level->shard_stride, full,
                 level->full_stride);
    }
    return;
  }
  for (int64_t i = begin; i < end; ++i) {
    copy_levels<kToFull>(stores, level + 1, innermost, 0, level[1].count, run_bytes, full, shard);
    full += level->full_stride;
    shard += level->shard_stride;
  }
}

// Copies steps `begin` to `end` of a box's outermost level; a single run counts as one step.
template <bool kToFull, typename Stores>
void copy_steps(Stores stores, const Box& box, int64_t begin, int64_t end, char* full,
                char* shard) {
  if (num_bytes(box) == 0) return;
  const Level one_run{1, 0, 0};
  const Level* first = box.levels.empty() ? &one_run : box.levels.data();
  const Level* innermost = box.levels.empty() ? &one_run : &box.levels.back();
  copy_levels<kToFull>(stores, first, innermost, begin, end, box.run_bytes, full + box.full_offset,
                       shard + box.shard_offset);
}

inline int64_t num_steps(const Box& box) { return box.levels.empty() ? 1 : box.levels[0].count; }

// Whether two boxes step through the full tensor in the same way, so their runs interleave. Empty
// boxes do not: they may have any number of steps.
inline bool interleave(const Box& a, const Box& b) {
  return num_bytes(a) > 0 && num_bytes(b) > 0 && !a.levels.empty() && !b.levels.empty() &&
         a.levels[0].count == b.levels[0].count &&
         a.levels[0].full_stride == b.levels[0].full_stride;
}

// Copying box after box would traverse the full tensor once per box; boxes that interleave are
// copied in turns instead, in portions that stay in the first-level cache.
template <bool kToFull, typename Stores, typename Shard>
void copy_in_turns(Stores stores, const std::vector<Box>& boxes, const std::vector<Shard*>& shards,
                   char* full) {
  constexpr int64_t kTurnBytes = 16 << 10;
  for (size_t first = 0, next; first < boxes.size(); first = next) {
    next = first + 1;
    while (next < boxes.size() && interleave(boxes[first], boxes[next])) ++next;
    const int64_t steps = num_steps(boxes[first]);
    const int64_t stride = boxes[first].levels.empty() ? 0 : boxes[first].levels[0].full_stride;
    const int64_t turn =
        next == first + 1 ? steps : std::max<int64_t>(1, kTurnBytes / std::max<int64_t>(1, stride));
    for (int64_t begin = 0; begin < steps; begin += turn) {
      const int64_t end = std::min(begin + turn, steps);
      for (size_t i = first; i < next; ++i) {
        char* shard = const_cast<char*>(shards[boxes[i].rank]);
        if (shard != nullptr) copy_steps<kToFull>(stores, boxes[i], begin, end, full, shard);
      }
    }
  }
}

template <bool kToFull, typename Shard>
void copy_boxes(const std::vector<Box>& boxes, const std::vector<Shard*>& shards, char* full) {
  int64_t bytes = 0;
  for (const Box& box : boxes) bytes += shards[box.rank] != nullptr ? num_bytes(box) : 0;
  if (bytes < (kToFull ? kStreamingBytes : kStreamingShardBytes)) {
    return copy_in_turns<kToFull>(ThroughCache{}, boxes, shards, full);
  }
  copy_in_turns<kToFull>(PastCache{}, boxes, shards, full);
  finish_streaming();
}

}  // namespace detail

// Copies one box from its rank's shard into the full tensor.
inline void assemble_box(const Box& box, const char* shard, char* full) {
  detail::copy_steps<true>(detail::ThroughCache{}, box, 0, detail::num_steps(box), full,
                           const_cast<char*>(shard));
}

// Copies one box from the full tensor into its rank's shard: the inverse of assemble_box.
inline void split_box(const Box& box, const char* full, char* shard) {
  detail::copy_steps<false>(detail::ThroughCache{}, box, 0, detail::num_steps(box),
                            const_cast<char*>(full), shard);
}

// Copies many boxes, faster than one by one. `shards[rank]` is a rank's shard; null skips its
// boxes.
inline void assemble_boxes(const std::vector<Box>& boxes, const std::vector<const char*>& shards,
                           char* full) {
  detail::copy_boxes<true>(boxes, shards, full);
}

inline void split_boxes(const std::vector<Box>& boxes, const char* full,
                        const std::vector<char*>& shards) {
  detail::copy_boxes<false>(boxes, shards, const_cast<char*>(full));
}

namespace detail {

// Splits `box` into parts of at most `max_bytes` each and calls `visit(part)` for them in order.
template <typename Visit>
void for_each_part(const Box& box, int64_t max_bytes, const Visit& visit) {
  const int64_t bytes = num_bytes(box);
  if (bytes == 0) return;
  if (bytes <= max_bytes) return visit(box);
  Box part = box;
  if (box.levels.empty()) {
    for (int64_t at = 0; at < box.run_bytes; at += max_bytes) {
      part.full_offset = box.full_offset + at;
      part.shard_offset = box.shard_offset + at;
      part.run_bytes = std::min(max_bytes, box.run_bytes - at);
      visit(part);
    }
    return;
  }
  const Level outermost = box.levels[0];
  const int64_t steps = std::max<int64_t>(1, max_bytes / (bytes / outermost.count));
  for (int64_t at = 0; at < outermost.count; at += steps) {
    part.full_offset = box.full_offset + at * outermost.full_stride;
    part.shard_offset = box.shard_offset + at * outermost.shard_stride;
    part.levels[0].count = std::min(steps, outermost.count - at);
    if (part.levels[0].count == 1) {
      Box inner = part;
      inner.levels.erase(inner.levels.begin());
      for_each_part(inner, max_bytes, visit);
    } else {
      visit(part);
    }
  }
}

}  // namespace detail

// Copies the boxes of `rank` from its shard into several full tensors, which other ranks read, or
// this one later: a part at a time into each, so that the shard is read from memory once.
inline void assemble_into_each(const std::vector<Box>& boxes, int64_t rank, const char* shard,
                               const std::vector<char*>& fulls) {
  if (fulls.empty()) return;
  constexpr int64_t kPartBytes = 64 << 10;
  int64_t bytes = 0;
  for (const Box& box : boxes) bytes += box.rank == rank ? num_bytes(box) : 0;
  const bool streaming = bytes * static_cast<int64_t>(fulls.size()) >= kStreamingBytes;
  char* from = const_cast<char*>(shard);
  const auto copy_part = [&](const Box& part) {
    const int64_t steps = detail::num_steps(part);
    const bool streamed = streaming && part.run_bytes >= detail::kShortestStreamedRun;
    for (size_t i = 0; i < fulls.size(); ++i) {
      char* full = fulls[i];
      if (!streamed) {
        detail::copy_steps<true>(detail::ThroughCache{}, part, 0, steps, full, from);
        continue;
      }
      detail::Others others;
      while (i + 1 < fulls.size() && others.count < detail::Others::kMax) {
        const int64_t distance = fulls[i + 1] - full;
        if (distance % detail::kStreamAlignment != 0) break;
        others.distances[others.count++] = distance;
        ++i;
      }
      detail::copy_steps<true>(detail::PastCache{others}, part, 0, steps, full, from);
    }
  };
  for (const Box& box : boxes) {
    if (box.rank == rank) detail::for_each_part(box, kPartBytes, copy_part);
  }
  if (streaming) detail::finish_streaming();
}

}  // namespace flex_model
