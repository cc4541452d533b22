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

// The piece as a strided copy with as few and as long runs as its strides allow.
Box to_box(const Piece& piece, const Sizes& full_sizes, const Sizes& shard_sizes,
           int64_t element_bytes) {
  const Sizes full_strides = contiguous_strides(full_sizes, element_bytes);
  const Sizes shard_strides = contiguous_strides(shard_sizes, element_bytes);
  Box box{piece.rank, 0, 0, element_bytes, {}};
  for (size_t d = 0; d < piece.sizes.size(); ++d) {
    box.full_offset += piece.full_start[d] * full_strides[d];
    box.shard_offset += piece.shard_start[d] * shard_strides[d];
  }
  for (size_t d = piece.sizes.size(); d-- > 0;) {  // from the innermost dim outwards
    const Level level{piece.sizes[d], full_strides[d], shard_strides[d]};
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

GatherPlan::GatherPlan(Sizes full_sizes, std::vector<Sizes> shard_sizes, std::vector<Piece> pieces,
                       int64_t element_bytes)
    : full_sizes_(std::move(full_sizes)), shard_sizes_(std::move(shard_sizes)) {
  if (element_bytes <= 0)
    throw std::invalid_argument("gather plan: an element must have at least one byte");
  boxes_.full_bytes = num_bytes(full_sizes_, element_bytes);
  for (const Sizes& sizes : shard_sizes_)
    boxes_.shard_bytes.push_back(num_bytes(sizes, element_bytes));
  check(pieces);
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.rank < b.rank; });
  for (const Piece& piece : pieces) {
    if (num_elements(piece.sizes) == 0) continue;
    boxes_.boxes.push_back(to_box(piece, full_sizes_, shard_sizes_[piece.rank], element_bytes));
  }
  hash_ = hash_of(boxes_.encode());
}

void GatherPlan::check(const std::vector<Piece>& pieces) const {
  const int64_t num_ranks = static_cast<int64_t>(shard_sizes_.size());
  std::vector<int64_t> covered(num_ranks, 0);
  int64_t covered_full = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    if (piece.rank < 0 || piece.rank >= num_ranks) {
      throw std::invalid_argument("gather plan: rank " + std::to_string(piece.rank) +
                                  " is not one of " + std::to_string(num_ranks) + " ranks");
    }
    const Sizes& shard = shard_sizes_[piece.rank];
    if (!fits(piece.full_start, piece.sizes, full_sizes_) ||
        !fits(piece.shard_start, piece.sizes, shard)) {
      throw std::invalid_argument("gather plan: a piece of sizes " + to_string(piece.sizes) +
                                  " of rank " + std::to_string(piece.rank) + " leaves its shard " +
                                  to_string(shard) + " or the full tensor " +
                                  to_string(full_sizes_));
    }
    const int64_t elements = num_elements(piece.sizes);
    covered[piece.rank] += elements;
    covered_full += elements;
    if (elements == 0) continue;
    for (size_t j = 0; j < i; ++j) {
      const Piece& other = pieces[j];
      if (num_elements(other.sizes) == 0) continue;
      if (overlap(piece.full_start, piece.sizes, other.full_start, other.sizes) ||
          (piece.rank == other.rank &&
           overlap(piece.shard_start, piece.sizes, other.shard_start, other.sizes))) {
        throw std::invalid_argument("gather plan: pieces of ranks " + std::to_string(other.rank) +
                                    " and " + std::to_string(piece.rank) + " overlap");
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
                                  " has elements that are in no piece");
    }
  }
}

}  // namespace flex_model
