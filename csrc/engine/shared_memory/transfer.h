// Transfers of tensors among the ranks of a group, along a GatherPlan or whole.
//
// Small tensors are sent inside the messages of one round. For large ones, each rank copies its
// shard directly into the final layout of the receiver's tensor, which is in the receiver's arena:
// one round sends its address, the next one ends the transfer. Tensors that are expected to be read
// only are stored once, in the first rank's arena, and every rank gets a view. A receiver whose
// tensor is not in its arena (which is full) gets the bytes through the messages, piece by piece.
//
// All are collective over the group; a plan's ranks are the group's, in its order, unless `ranks`
// lists them. Plans and the kinds of tensors must be the same on every rank, which the caller has
// checked.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../gather_plan/gather_plan.h"
#include "group.h"
#include "owned.h"

namespace flex_model {

class InFlightTargets;

// Writes the full tensor to each of `fulls`, and returns `num_views` more, in memory that all ranks
// read and whose pages are copied when this rank writes to them (see CowMapping); copies where that
// is not possible. The numbers may differ by rank.
std::vector<Owned> all_gather(Group& group, const GatherPlan& plan, const char* shard,
                              const std::vector<char*>& fulls, int64_t num_views = 0);

// Exchanges headers, with this rank's shard behind its own in one round, and returns those of all
// ranks. Where all headers are equal, but for the bytes [from, to), writes the full tensor to each
// of `fulls`; else a rank may have sent no shard: a header alone is what `exchange` sends. `places`
// are the ranks of the group that hold the plan's shards; with none, there is nothing to gather.
// std::length_error if a shard does not fit its message.
struct ExceptBytes {
  size_t from, to;
};
std::vector<std::string> gather_at_once(Group& group, const std::string& header,
                                        ExceptBytes may_differ, const GatherPlan& plan,
                                        const std::vector<int64_t>& places, const char* shard,
                                        const std::vector<char*>& fulls);

// One tensor of several that are gathered together.
struct Gathered {
  const GatherPlan* plan;
  std::vector<int64_t> ranks;  // of the group, that hold the plan's shards
  const char* shard;           // this rank's; null if it has none
  char* full;                  // on rank 0; null elsewhere
};

// Gathers the full tensors on rank 0. The others don't wait until it has them.
void gather_to_first(Group& group, const std::vector<Gathered>& tensors);

// gather_to_first in two halves. In between, a rank may write its shards to their targets by other
// means than the CPU, such as copies of a GPU. Tensors that all fit the messages have no targets.
//
// Memory of rank 0 is never reused if end() is not reached, because a late rank may still write to
// it. `tensors`, plans included, must outlive this; their `shard` is not used.
class OpenGather {
 public:
  // The address of rank 0's full tensor in this process.
  struct Target {
    char* full = nullptr;  // null: not in rank 0's arena, or this rank has no shard
    MemoryRange segment;   // the one that contains it
  };

  // Sends the addresses of rank 0's tensors. Collective.
  OpenGather(Group& group, const std::vector<Gathered>& tensors);
  OpenGather(const OpenGather&) = delete;
  OpenGather& operator=(const OpenGather&) = delete;
  ~OpenGather();

  const Target& target(size_t tensor) const { return targets_[tensor]; }

  // Sends this rank's shards, one per tensor; null where this rank has none, or has written it to
  // its target already. Afterwards rank 0 may read its tensors. std::invalid_argument, and nothing
  // is sent, if a shard without a target is missing. Collective.
  void end(const std::vector<const char*>& shards);

 private:
  int64_t place_of_me(size_t tensor) const;
  void exchange_targets();
  void move_through_messages(const std::vector<const char*>& shards);

  Group& group_;
  const std::vector<Gathered>& tensors_;
  std::vector<Target> targets_;
  std::vector<bool> has_place_;  // the same on all ranks
  std::unique_ptr<InFlightTargets> in_flight_;
  uint64_t hash_;
  bool is_small_ = false;
};

// Copies this rank's shard of rank 0's `full` (null elsewhere) to `shard`.
void scatter_from_first(Group& group, const GatherPlan& plan, const char* full, char* shard);

// Copies rank 0's bytes (null elsewhere) to `to`; on rank 0, nothing is written.
void broadcast(Group& group, const char* from, int64_t bytes, char* to);

}  // namespace flex_model
