#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "in_flight_targets.h"
#include "messages.h"
#include "transfer.h"

namespace flex_model {

void gather_to_first(Group& group, const std::vector<Gathered>& tensors) {
  std::vector<const char*> shards;
  for (const Gathered& tensor : tensors) shards.push_back(tensor.shard);
  OpenGather(group, tensors).end(shards);
}

OpenGather::OpenGather(Group& group, const std::vector<Gathered>& tensors)
    : group_(group),
      tensors_(tensors),
      targets_(tensors.size()),
      has_place_(tensors.size(), false),
      hash_(tensors.size()) {
  std::vector<int64_t> bytes_of_rank(group.size(), 0);
  for (const Gathered& tensor : tensors) {
    for (size_t i = 0; i < tensor.ranks.size(); ++i) {
      bytes_of_rank.at(tensor.ranks[i]) += tensor.plan->box_plan().shard_bytes.at(i);
    }
    // Order counts: ranks that gather the same tensors in another order must not be taken for
    // equal.
    hash_ = hash_ * 0x9e3779b97f4a7c15 + tensor.plan->hash();
  }
  // The same on all ranks, since it depends on the plans only: it decides how many rounds there
  // are.
  is_small_ = largest(bytes_of_rank) <= kMessageBytes;
  if (!is_small_) exchange_targets();
}

OpenGather::~OpenGather() = default;

// The index of this rank's shard in the plan; -1 if it has none.
int64_t OpenGather::place_of_me(size_t tensor) const {
  const std::vector<int64_t>& ranks = tensors_[tensor].ranks;
  const auto found = std::find(ranks.begin(), ranks.end(), group_.rank());
  return found == ranks.end() ? -1 : found - ranks.begin();
}

// Sends rank 0's places, in as many messages as they need, and maps them here.
void OpenGather::exchange_targets() {
  const Arena& arena = Arena::of_process();
  const bool is_first = group_.rank() == 0;
  std::vector<Place> places;
  if (is_first) {
    std::vector<char*> in_arena;
    for (const Gathered& tensor : tensors_) {
      places.push_back(arena.place_of(tensor.full, tensor.plan->box_plan().full_bytes));
      if (places.back().segment >= 0) in_arena.push_back(tensor.full);
    }
    in_flight_ = std::make_unique<InFlightTargets>(std::move(in_arena));
  }
  const size_t max_places = kMessageBytes / sizeof(Place);
  for (size_t first = 0; first < tensors_.size(); first += max_places) {
    const size_t count = std::min(max_places, tensors_.size() - first);
    char* message = group_.begin();
    if (is_first) std::memcpy(message, &places[first], count * sizeof(Place));
    group_.post(Op::kGather, hash_);
    const auto* sent = reinterpret_cast<const Place*>(group_.message(0));
    for (size_t t = first; t < first + count; ++t) {
      const Place& place = sent[t - first];
      has_place_[t] = place.segment >= 0;  // on all ranks: those without shards count rounds, too
      if (!has_place_[t] || place_of_me(t) < 0) continue;
      if (is_first) {
        targets_[t] = {tensors_[t].full, arena.segment_of(tensors_[t].full)};
      } else {
        const int64_t bytes = tensors_[t].plan->box_plan().full_bytes;
        targets_[t].full = group_.peer(0, place, bytes, &targets_[t].segment);
      }
    }
  }
}

void OpenGather::end(const std::vector<const char*>& shards) {
  // Before anything is sent: a rank that throws after its peers have begun would break the group.
  for (size_t t = 0; t < tensors_.size(); ++t) {
    const int64_t i = place_of_me(t);
    const bool is_needed =
        i >= 0 && targets_[t].full == nullptr && tensors_[t].plan->box_plan().shard_bytes[i] > 0;
    if (shards.size() != tensors_.size() || (is_needed && shards[t] == nullptr)) {
      throw std::invalid_argument("OpenGather.end: a shard that has no target is missing");
    }
  }
  for (size_t t = 0; t < tensors_.size(); ++t) {
    if (targets_[t].full == nullptr || shards[t] == nullptr) continue;
    assemble_into_each(tensors_[t].plan->box_plan().boxes, place_of_me(t), shards[t],
                       {targets_[t].full});
  }
  const bool streams = std::find(has_place_.begin(), has_place_.end(), false) != has_place_.end();
  if (streams) move_through_messages(shards);
  if (is_small_) return;
  // Only the first rank waits: the others' shards are copied, and they may go on computing.
  group_.begin();
  group_.post(Op::kDone, hash_);
  if (group_.rank() != 0) return;
  wait_for_all(group_);
  in_flight_->done();
}

// Sends the tensors that have no place, packed; in one message where all of them are small.
void OpenGather::move_through_messages(const std::vector<const char*>& shards) {
  // Per rank: the bytes of all its shards, and the offset of each shard among them.
  std::vector<int64_t> bytes_of_rank(group_.size(), 0);
  std::vector<std::vector<int64_t>> starts(tensors_.size());
  for (size_t t = 0; t < tensors_.size(); ++t) {
    for (size_t i = 0; !has_place_[t] && i < tensors_[t].ranks.size(); ++i) {
      starts[t].push_back(bytes_of_rank[tensors_[t].ranks[i]]);
      bytes_of_rank[tensors_[t].ranks[i]] += tensors_[t].plan->box_plan().shard_bytes[i];
    }
  }
  const auto pack = [&](char* to) {
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const int64_t i = place_of_me(t);
      if (has_place_[t] || i < 0) continue;
      const int64_t bytes = tensors_[t].plan->box_plan().shard_bytes[i];
      if (bytes > 0) std::memcpy(to + starts[t][i], shards[t], bytes);
    }
  };
  const auto unpack = [&](const auto& buffer_of_rank) {
    for (size_t t = 0; t < tensors_.size(); ++t) {
      if (has_place_[t]) continue;
      std::vector<const char*> from;
      for (size_t i = 0; i < tensors_[t].ranks.size(); ++i) {
        from.push_back(buffer_of_rank(tensors_[t].ranks[i]) + starts[t][i]);
      }
      assemble_boxes(tensors_[t].plan->box_plan().boxes, from, tensors_[t].full);
    }
  };
  const bool is_first = group_.rank() == 0;
  if (is_small_) {
    pack(group_.begin());
    group_.post(Op::kGather, hash_);
    if (!is_first) return;
    unpack([&](int64_t r) { return group_.message(r); });
    wait_for_all(group_);  // also for ranks without shards, which may be out of step
    return;
  }
  Bytes packed(new char[std::max<int64_t>(1, bytes_of_rank[group_.rank()])]);
  pack(packed.get());
  std::vector<Bytes> all;
  stream(group_, packed.get(), bytes_of_rank, is_first ? &all : nullptr);
  if (is_first) unpack([&](int64_t r) { return static_cast<const char*>(all[r].get()); });
}

}  // namespace flex_model
