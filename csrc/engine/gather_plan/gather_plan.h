// A plan of which bytes of each rank's shard make up the full tensor: a pure function of sizes,
// without tensors or communication.
//
//   shard of rank r   contiguous, sizes `shard_sizes[r]`
//   full              contiguous, sizes `full_sizes`
//
// A plan is exact: every byte of the full tensor comes from exactly one shard, and every byte of a
// shard has a place in it. So its inverse, from full to shards, is the scatter.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "boxes/boxes.h"

namespace flex_model {

using Sizes = std::vector<int64_t>;

// A box counted in elements: a part of one rank's shard, of `sizes` per dim, at `shard_start` there
// and at `full_start` in full. A plan makes a `Box` of it, which is counted in bytes.
struct ElementBox {
  int64_t rank;
  Sizes full_start;
  Sizes shard_start;
  Sizes sizes;
};

class GatherPlan {
 public:
  // std::invalid_argument if a box leaves a tensor, two boxes overlap, or some element is in no
  // box.
  GatherPlan(Sizes full_sizes, std::vector<Sizes> shard_sizes, std::vector<ElementBox> boxes,
             int64_t element_bytes);

  const Sizes& full_sizes() const { return full_sizes_; }
  const std::vector<Sizes>& shard_sizes() const { return shard_sizes_; }
  const BoxPlan& box_plan() const { return box_plan_; }

  // A hash of the whole plan: equal plans have equal hashes.
  uint64_t hash() const { return hash_; }

 private:
  void check(const std::vector<ElementBox>& boxes) const;

  Sizes full_sizes_;
  std::vector<Sizes> shard_sizes_;
  BoxPlan box_plan_;
  uint64_t hash_;
};

}  // namespace flex_model
