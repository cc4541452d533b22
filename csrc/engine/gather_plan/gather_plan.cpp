#include "gather_plan.h"

#include <algorithm>
#include <stdexcept>

namespace flex_model {
namespace {

std::string to_string(const Sizes& sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + (sizes.size() == 1 ? ",)" : ")");
}

int64_t num_elements(const Sizes& sizes) {
  int64_t product = 1;
  for (int64_t size : sizes) {
    if (size < 0) throw std::invalid_argument("gather plan: negative size in " + to_string(sizes));
    if (__builtin_mul_overflow(product, size, &product)) {
      throw std::invalid_argument("gather plan: " + to_string(sizes) +
                                  " has more elements than 64 bits can count");
    }
  }
  return product;
}

// FNV-1a hash, a word at a time.
uint64_t hash_of(const std::vector<int64_t>& code) {
  uint64_t hash = 0xcbf29ce484222325;
  for (int64_t word : code) hash = (hash ^ static_cast<uint64_t>(word)) * 0x100000001b3;
  return hash ^ hash >> 32;
}

int64_t num_bytes(const Sizes& sizes, int64_t element_bytes) {
  int64_t bytes;
  if (__builtin_mul_overflow(num_elements(sizes), element_bytes, &bytes)) {
    throw std::invalid_argument("gather plan: " + to_string(sizes) +
                                " has more bytes than 64 bits can count");
  }
  return bytes;
}

// Byte strides of a contiguous tensor.
Sizes contiguous_strides(const Sizes& sizes, int64_t element_bytes) {
  Sizes strides(sizes.size());
  int64_t stride = element_bytes;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= sizes[d];
  }
  return strides;
}

// Whether a block at `start` of `sizes` lies within a tensor of `bounds`.
bool fits(const Sizes& start, const Sizes& sizes, const Sizes& bounds) {
  if (start.size() != bounds.size() || sizes.size() != bounds.size()) return false;
  for (size_t d = 0; d < bounds.size(); ++d) {
    if (start[d] < 0 || sizes[d] < 0 || start[d] > bounds[d] || sizes[d] > bounds[d] - start[d])
      return false;
  }
  return true;
}

bool overlap(const Sizes& start_a, const Sizes& sizes_a, const Sizes& start_b,
             const Sizes& sizes_b) {
  for (size_t d = 0; d < start_a.size(); ++d) {
    if (start_a[d] + sizes_a[d] <= start_b[d] || start_b[d] + sizes_b[d] <= start_a[d])
      return false;
  }
  return true;
}

// The box in bytes: as a strided copy with as few and as long runs as its strides allow.
Box to_box(const ElementBox& elements, const Sizes& full_sizes, const Sizes& shard_sizes,
           int64_t element_bytes) {
  const Sizes full_strides = contiguous_strides(full_sizes, element_bytes);
  const Sizes shard_strides = contiguous_strides(shard_sizes, element_bytes);
  Box box{elements.rank, 0, 0, element_bytes, {}};
  for (size_t d = 0; d < elements.sizes.size(); ++d) {
    box.full_offset += elements.full_start[d] * full_strides[d];
    box.shard_offset += elements.shard_start[d] * shard_strides[d];
  }
  for (size_t d = elements.sizes.size(); d-- > 0;) {  // from the innermost dim outwards
    const Level level{elements.sizes[d], full_strides[d], shard_strides[d]};
    if (level.count == 1) continue;
    if (box.levels.empty() && level.full_stride == box.run_bytes &&
        level.shard_stride == box.run_bytes) {
      box.run_bytes *= level.count;
      continue;
    }
    if (!box.levels.empty()) {
      Level& inner = box.levels.back();
      if (level.full_stride == inner.count * inner.full_stride &&
          level.shard_stride == inner.count * inner.shard_stride) {
        inner.count *= level.count;
        continue;
      }
    }
    box.levels.push_back(level);
  }
  std::reverse(box.levels.begin(), box.levels.end());
  return box;
}

}  // namespace

GatherPlan::GatherPlan(Sizes full_sizes, std::vector<Sizes> shard_sizes,
                       std::vector<ElementBox> boxes, int64_t element_bytes)
    : full_sizes_(std::move(full_sizes)), shard_sizes_(std::move(shard_sizes)) {
  if (element_bytes <= 0)
    throw std::invalid_argument("gather plan: an element must have at least one byte");
  box_plan_.full_bytes = num_bytes(full_sizes_, element_bytes);
  for (const Sizes& sizes : shard_sizes_)
    box_plan_.shard_bytes.push_back(num_bytes(sizes, element_bytes));
  check(boxes);
  std::stable_sort(boxes.begin(), boxes.end(),
                   [](const ElementBox& a, const ElementBox& b) { return a.rank < b.rank; });
  for (const ElementBox& box : boxes) {
    if (num_elements(box.sizes) == 0) continue;
    box_plan_.boxes.push_back(to_box(box, full_sizes_, shard_sizes_[box.rank], element_bytes));
  }
  hash_ = hash_of(box_plan_.encode());
}

void GatherPlan::check(const std::vector<ElementBox>& boxes) const {
  const int64_t num_ranks = static_cast<int64_t>(shard_sizes_.size());
  std::vector<int64_t> covered(num_ranks, 0);
  int64_t covered_full = 0;
  for (size_t i = 0; i < boxes.size(); ++i) {
    const ElementBox& box = boxes[i];
    if (box.rank < 0 || box.rank >= num_ranks) {
      throw std::invalid_argument("gather plan: rank " + std::to_string(box.rank) +
                                  " is not one of " + std::to_string(num_ranks) + " ranks");
    }
    const Sizes& shard = shard_sizes_[box.rank];
    if (!fits(box.full_start, box.sizes, full_sizes_) || !fits(box.shard_start, box.sizes, shard)) {
      throw std::invalid_argument("gather plan: a box of sizes " + to_string(box.sizes) +
                                  " of rank " + std::to_string(box.rank) + " leaves its shard " +
                                  to_string(shard) + " or the full tensor " +
                                  to_string(full_sizes_));
    }
    const int64_t elements = num_elements(box.sizes);
    covered[box.rank] += elements;
    covered_full += elements;
    if (elements == 0) continue;
    for (size_t j = 0; j < i; ++j) {
      const ElementBox& other = boxes[j];
      if (num_elements(other.sizes) == 0) continue;
      if (overlap(box.full_start, box.sizes, other.full_start, other.sizes) ||
          (box.rank == other.rank &&
           overlap(box.shard_start, box.sizes, other.shard_start, other.sizes))) {
        throw std::invalid_argument("gather plan: boxes of ranks " + std::to_string(other.rank) +
                                    " and " + std::to_string(box.rank) + " overlap");
      }
    }
  }
  if (covered_full != num_elements(full_sizes_)) {
    throw std::invalid_argument("gather plan: the shards hold " + std::to_string(covered_full) +
                                " of the " + std::to_string(num_elements(full_sizes_)) +
                                " elements of the full tensor " + to_string(full_sizes_));
  }
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    if (covered[rank] != num_elements(shard_sizes_[rank])) {
      throw std::invalid_argument("gather plan: rank " + std::to_string(rank) +
                                  " has elements that are in no box");
    }
  }
}

}  // namespace flex_model
