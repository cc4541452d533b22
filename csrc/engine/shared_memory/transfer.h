// What a group moves: tensors, along a GatherPlan or whole.
//
// Small tensors travel inside the messages of one round. Large ones go straight from the shard into
// the final layout of the receiver's tensor, which lies in its arena: one round tells where, the
// next that all is written. Those that are expected to be read only are one, in the first rank's
// arena, of which every rank has a view. A receiver whose tensor is not in its arena (the arena is
// full) gets the bytes through the messages, piece by piece.
//
// All are collective over the group; a plan's ranks are the group's, in its order, unless `ranks`
// says which they are. Plans, and which tensors are asked for, must be the same on every rank:
// agreed on before.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../layout/gather_plan.h"
#include "group.h"
#include "owned.h"

namespace flex_model {

class Offer;

// The full tensor at each of `fulls`, and `num_views` times more in memory that all ranks read and
// whose pages become this rank's own where it writes to them (see Views); a copy where that can't
// be had. Every rank may have other numbers.
std::vector<Owned> all_gather(Group& group, const GatherPlan& plan, const char* shard,
                              const std::vector<char*>& fulls, int64_t num_views = 0);

// One tensor of several that are gathered together.
struct Gathered {
  const GatherPlan* plan;
  std::vector<int64_t> ranks;  // of the group, that hold the plan's shards
  const char* shard;           // this rank's; null if it has none
  char* full;                  // on rank 0; null elsewhere
};

// The full tensors on rank 0. The others don't wait for it to have them.
void gather_to_first(Group& group, const std::vector<Gathered>& tensors);

// gather_to_first in two halves. In between, a rank may write shards to their places by other means
// than the CPU: a GPU's copies. Tensors that all fit the messages have no places, and one half.
//
// Memory of rank 0 that was offered and not ended is never used again, for a rank that is late may
// write to it yet. `tensors`, plans included, must outlive this; their shards are not looked at.
class OpenGather {
 public:
  // Where rank 0's full tensor lies in this process.
  struct Target {
    char* full = nullptr;  // null: not in rank 0's arena, or this rank holds none of it
    Stretch segment;       // that it is in
  };

  // Collective: rank 0 tells where its tensors are.
  OpenGather(Group& group, const std::vector<Gathered>& tensors);
  OpenGather(const OpenGather&) = delete;
  OpenGather& operator=(const OpenGather&) = delete;
  ~OpenGather();

  const Target& target(size_t tensor) const { return targets_[tensor]; }

  // Collective: moves this rank's shards, one for each tensor. Null, where this rank has none or
  // has written it to its target: whoever hears of the end may read it then. std::invalid_argument,
  // and nothing happens, if a shard is missing that has no target.
  void end(const std::vector<const char*>& shards);

 private:
  int64_t place_of_me(size_t tensor) const;
  void meet();
  void move_through_messages(const std::vector<const char*>& shards);

  Group& group_;
  const std::vector<Gathered>& tensors_;
  std::vector<Target> targets_;
  std::vector<bool> has_place_;  // the same on all ranks
  std::unique_ptr<Offer> offer_;
  uint64_t hash_;
  bool is_small_ = false;
};

// This rank's shard of rank 0's full tensor (null elsewhere).
void scatter_from_first(Group& group, const GatherPlan& plan, const char* full, char* shard);

// Rank 0's bytes (null elsewhere) at `to`; on rank 0, nothing is written.
void broadcast(Group& group, const char* from, int64_t bytes, char* to);

}  // namespace flex_model
