// What a group moves: messages, and tensors along a GatherPlan.
//
// Small tensors travel inside the messages of one round. Large ones go straight from the shard into
// the final layout of the receiver's tensor, which lies in its arena: one round tells where, the
// next that all is written. A receiver whose tensor is not in its arena (the arena is full) gets
// the bytes through the messages, piece by piece.
//
// All are collective over the group; a plan's ranks are the group's, in its order, unless `ranks`
// says which they are. Plans, and which tensors are asked for, must be the same on every rank:
// agreed on before.
#pragma once

#include <cstdint>
#include <vector>

#include "../layout/gather_plan.h"
#include "group.h"

namespace flex_model {

// `bytes` bytes of every rank, one after the other, at `all`.
void exchange(Group& group, const char* mine, int64_t bytes, char* all);

// The full tensor at each of `fulls`, of which every rank may have another number.
void all_gather(Group& group, const GatherPlan& plan, const char* shard,
                const std::vector<char*>& fulls);

// One tensor of several that are gathered together.
struct Gathered {
  const GatherPlan* plan;
  std::vector<int64_t> ranks;  // of the group, that hold the plan's shards
  const char* shard;           // this rank's; null if it has none
  char* full;                  // on rank 0; null elsewhere
};

// The full tensors on rank 0. The others don't wait for it to have them.
void gather_to_first(Group& group, const std::vector<Gathered>& tensors);

// This rank's shard of rank 0's full tensor (null elsewhere).
void scatter_from_first(Group& group, const GatherPlan& plan, const char* full, char* shard);

// Rank 0's bytes (null elsewhere) at `to`; on rank 0, nothing is written.
void broadcast(Group& group, const char* from, int64_t bytes, char* to);

}  // namespace flex_model
