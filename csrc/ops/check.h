// Checks shared by the CPU and CUDA ops. A message has the op's name (`op`), the expected and
// actual values, and the next step.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "boxes/boxes.h"

namespace flex_model {

using Ints = std::vector<int64_t>;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// STD_TORCH_CHECK without the C++ function, file and line, which don't help a Python user.
template <typename... Args>
void check(bool ok, const Args&... message) {
  if (ok) return;
  std::ostringstream text;
  ((text << message), ...);
  throw std::runtime_error(text.str());
}

inline std::string to_string(const Ints& sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + (sizes.size() == 1 ? ",)" : ")");
}

inline std::string sizes_of(const Tensor& tensor) {
  Ints sizes(tensor.dim());
  for (size_t d = 0; d < sizes.size(); ++d) sizes[d] = tensor.size(d);
  return to_string(sizes);
}

inline int64_t num_bytes(const Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

inline void check_contiguous(const char* op, const char* name, const Tensor& tensor) {
  check(tensor.is_contiguous(), op, ": `", name,
        "` must be contiguous, got a strided tensor of sizes ", sizes_of(tensor),
        "; call .contiguous() first");
}

// For buffers of raw bytes: gathered shards.
inline void check_buffer(const char* op, const char* name, const Tensor& tensor) {
  check(tensor.dim() == 1 && tensor.scalar_type() == ScalarType::Byte, op, ": `", name,
        "` must be a 1-D uint8 buffer, got ", tensor.dim(), " dims of ", tensor.element_size(),
        "-byte elements; pass tensor.reshape(-1).view(torch.uint8)");
  check_contiguous(op, name, tensor);
}

inline BoxPlan decode_plan(const char* op, const Ints& plan) {
  try {
    return BoxPlan::decode(plan.data(), static_cast<int64_t>(plan.size()));
  } catch (const std::invalid_argument& error) {
    check(false, op, ": ", error.what(), "; pass the `code` of a GatherPlan as it is");
    throw;
  }
}

// Checks that a full tensor or a shard has the bytes of the plan.
inline void check_num_bytes(const char* op, const char* name, const Tensor& tensor,
                            int64_t expected) {
  check(num_bytes(tensor) == expected, op, ": `", name, "` must have ", expected,
        " bytes by the plan, got ", num_bytes(tensor), " of sizes ", sizes_of(tensor),
        "; the plan must be made for the same sizes and element size");
}

// Decodes the plan of the input `full`, and checks that tensor.
inline BoxPlan decode_plan_of(const char* op, const Tensor& full, const Ints& code) {
  check_contiguous(op, "full", full);
  BoxPlan plan = decode_plan(op, code);
  check_num_bytes(op, "full", full, plan.full_bytes);
  return plan;
}

// Checks that the boxes fill the result, which would have uninitialized memory otherwise.
inline void check_filled(const char* op, const char* name, int64_t copied, int64_t expected) {
  check(copied == expected, op, ": the plan fills ", copied, " of the ", expected, " bytes of ",
        name, "; pass the `code` of a GatherPlan as it is");
}

// Returns the bytes that the boxes of `rank` move; of all ranks if it is -1.
inline int64_t num_copied_bytes(const BoxPlan& plan, int64_t rank = -1) {
  int64_t bytes = 0;
  for (const Box& box : plan.boxes) {
    if (rank != -1 && box.rank != rank) continue;
    if (__builtin_add_overflow(bytes, num_bytes(box), &bytes))
      return std::numeric_limits<int64_t>::max();
  }
  return bytes;
}

// Checks that each shard which the plan reads or writes is inside a buffer of `total` bytes.
inline void check_offsets(const char* op, const BoxPlan& plan, const Ints& offsets, int64_t total) {
  const size_t num_ranks = plan.shard_bytes.size();
  check(offsets.size() == num_ranks, op, ": `offsets` must have one entry for each of the plan's ",
        num_ranks, " ranks, got ", offsets.size());
  for (const Box& box : plan.boxes) {
    const int64_t offset = offsets[box.rank], bytes = plan.shard_bytes[box.rank];
    check(offset != -1, op, ": the plan needs the shard of rank ", box.rank,
          ", whose offset is -1 (absent)");
    check(offset >= 0 && bytes <= total && offset <= total - bytes, op, ": the shard of rank ",
          box.rank, " (", bytes, " bytes at offset ", offset, ") must lie inside the buffer of ",
          total, " bytes; offsets count bytes");
  }
}

inline void check_rank(const char* op, const BoxPlan& plan, int64_t rank) {
  const int64_t num_ranks = static_cast<int64_t>(plan.shard_bytes.size());
  check(rank >= 0 && rank < num_ranks, op, ": rank must be in [0, ", num_ranks - 1,
        "] for this plan, got ", rank);
}

inline void check_total(const char* op, int64_t total) {
  check(total >= 0, op, ": `total` must be a number of bytes, got ", total);
}

// Checks, for writes into the buffer, that no two shards share bytes.
inline void check_disjoint(const char* op, const BoxPlan& plan, const Ints& offsets) {
  std::vector<std::pair<int64_t, int64_t>> shards;  // offset, rank
  for (size_t rank = 0; rank < offsets.size(); ++rank) {
    if (offsets[rank] >= 0 && plan.shard_bytes[rank] > 0) shards.emplace_back(offsets[rank], rank);
  }
  std::sort(shards.begin(), shards.end());
  for (size_t i = 1; i < shards.size(); ++i) {
    const auto [offset, rank] = shards[i - 1];
    check(offset + plan.shard_bytes[rank] <= shards[i].first, op, ": the shards of ranks ", rank,
          " and ", shards[i].second,
          " overlap in the buffer; space `offsets` by the plan's shard_bytes");
  }
}

}  // namespace flex_model
