#include "transfer.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>

namespace flex_model {
namespace {

using Bytes = std::unique_ptr<char[]>;

// The largest shards that travel inside messages to every rank: larger ones are written once, where
// they are to be, for less than the second copy costs.
constexpr int64_t kInlineBytes = 16 << 10;
constexpr int64_t kMaxPlaces = kMessageBytes / sizeof(Place);

int64_t largest(const std::vector<int64_t>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

// Tensors that peers write to. If the transfer fails, a peer that is late may write yet: then their
// memory is not used again.
class Open {
 public:
  explicit Open(std::vector<char*> tensors) : tensors_(std::move(tensors)) {}
  ~Open() {
    if (is_done_) return;
    for (char* tensor : tensors_) Arena::of_process().retire(tensor);
  }
  void done() { is_done_ = true; }

 private:
  std::vector<char*> tensors_;
  bool is_done_ = false;
};

// Every rank's bytes in one stream, piece by piece through the messages. Who receives has `into`
// with a buffer for each rank; null elsewhere.
void stream(Group& group, const char* mine, const std::vector<int64_t>& bytes_of_rank,
            std::vector<Bytes>* into) {
  const int64_t total = largest(bytes_of_rank);
  if (into != nullptr) {
    into->clear();
    for (int64_t bytes : bytes_of_rank) into->emplace_back(new char[std::max<int64_t>(1, bytes)]);
  }
  for (int64_t at = 0; at < total; at += kMessageBytes) {
    const auto piece = [&](int64_t rank) {
      return std::clamp<int64_t>(bytes_of_rank[rank] - at, 0, kMessageBytes);
    };
    char* message = group.begin();
    if (piece(group.rank()) > 0) std::memcpy(message, mine + at, piece(group.rank()));
    group.post(Act::kStream, at);
    if (into == nullptr) continue;
    for (int64_t r = 0; r < group.size(); ++r) {
      const char* text = group.message(r);
      if (piece(r) > 0) std::memcpy((*into)[r].get() + at, text, piece(r));
    }
  }
}

void wait_for_all(Group& group) {
  for (int64_t r = 0; r < group.size(); ++r) group.message(r);
}

// The plan's boxes of `rank`, from its shard into each of `fulls`.
void write_into(const GatherPlan& plan, int64_t rank, const char* shard,
                const std::vector<char*>& fulls) {
  if (!fulls.empty()) assemble_into_each(plan.boxes().boxes, rank, shard, fulls);
}

}  // namespace

void exchange(Group& group, const char* mine, int64_t bytes, char* all) {
  for (int64_t at = 0; at < bytes; at += kMessageBytes) {
    const int64_t piece = std::min(bytes - at, kMessageBytes);
    std::memcpy(group.begin(), mine + at, piece);
    group.post(Act::kExchange, bytes);
    for (int64_t r = 0; r < group.size(); ++r) {
      std::memcpy(all + r * bytes + at, group.message(r), piece);
    }
  }
}

void all_gather(Group& group, const GatherPlan& plan, const char* shard,
                const std::vector<char*>& fulls) {
  const Boxes& boxes = plan.boxes();
  const int64_t me = group.rank(), size = group.size();
  if (largest(boxes.shard_bytes) <= kInlineBytes) {
    char* message = group.begin();
    if (boxes.shard_bytes[me] > 0) std::memcpy(message, shard, boxes.shard_bytes[me]);
    group.post(Act::kAllGather, plan.hash());
    std::vector<const char*> shards(size);
    for (int64_t r = 0; r < size; ++r) shards[r] = r == me ? shard : group.message(r);
    for (char* full : fulls) assemble_boxes(boxes.boxes, shards, full);
    return;
  }

  // Where everyone's tensors are: their number, then the places.
  const Arena& arena = Arena::of_process();
  std::vector<char*> in_arena, elsewhere;
  auto* mine = reinterpret_cast<Place*>(group.begin());
  int64_t num_places = 0;
  if (static_cast<int64_t>(fulls.size()) >= kMaxPlaces) throw std::length_error("all_gather");
  for (char* full : fulls) {
    const Place place = arena.place_of(full, boxes.full_bytes);
    if (place.segment < 0) {
      elsewhere.push_back(full);
    } else {
      in_arena.push_back(full);
      mine[++num_places] = place;
    }
  }
  mine[0] = {num_places, static_cast<int64_t>(elsewhere.size())};
  Open open(in_arena);
  group.post(Act::kAllGather, plan.hash());

  std::vector<char*> targets;
  bool streams = false;
  for (int64_t k = 0; k < size; ++k) {  // one's own first: each rank begins at another place
    const int64_t r = (me + k) % size;
    const auto* places = reinterpret_cast<const Place*>(group.message(r));
    streams = streams || places[0].offset > 0;
    if (r == me) {
      targets.insert(targets.end(), in_arena.begin(), in_arena.end());
      continue;
    }
    for (int64_t i = 1; i <= places[0].segment; ++i) {
      targets.push_back(group.peer(r, places[i], boxes.full_bytes));
    }
  }
  write_into(plan, me, shard, targets);
  if (streams) {
    std::vector<Bytes> all;
    stream(group, shard, boxes.shard_bytes, elsewhere.empty() ? nullptr : &all);
    std::vector<const char*> shards;
    for (const Bytes& bytes : all) shards.push_back(bytes.get());
    for (char* full : elsewhere) assemble_boxes(boxes.boxes, shards, full);
  }
  group.begin();
  group.post(Act::kDone, plan.hash());
  wait_for_all(group);
  open.done();
}

void gather_to_first(Group& group, const std::vector<Gathered>& tensors) {
  const int64_t me = group.rank(), size = group.size();
  if (static_cast<int64_t>(tensors.size()) > kMaxPlaces) {
    for (size_t at = 0; at < tensors.size(); at += kMaxPlaces) {
      const size_t end = std::min<size_t>(at + kMaxPlaces, tensors.size());
      gather_to_first(group, {tensors.begin() + at, tensors.begin() + end});
    }
    return;
  }
  // Of each rank: the bytes of all its shards, and where each shard begins among them.
  std::vector<int64_t> bytes_of_rank(size, 0);
  std::vector<std::vector<int64_t>> starts;
  uint64_t hash = tensors.size();
  for (const Gathered& tensor : tensors) {
    starts.emplace_back();
    for (size_t i = 0; i < tensor.ranks.size(); ++i) {
      starts.back().push_back(bytes_of_rank[tensor.ranks[i]]);
      bytes_of_rank[tensor.ranks[i]] += tensor.plan->boxes().shard_bytes[i];
    }
    hash = hash * 0x9e3779b97f4a7c15 + tensor.plan->hash();
  }
  const auto place_in = [&](const Gathered& tensor) {
    const auto found = std::find(tensor.ranks.begin(), tensor.ranks.end(), me);
    return found == tensor.ranks.end() ? int64_t{-1} : found - tensor.ranks.begin();
  };
  const auto pack = [&](char* to) {
    for (const Gathered& tensor : tensors) {
      const int64_t i = place_in(tensor);
      if (i < 0) continue;
      const int64_t bytes = tensor.plan->boxes().shard_bytes[i];
      if (bytes > 0) std::memcpy(to, tensor.shard, bytes);
      to += bytes;
    }
  };
  const auto unpack = [&](const auto& buffer_of_rank, const auto& wanted) {
    for (size_t t = 0; t < tensors.size(); ++t) {
      if (!wanted(tensors[t])) continue;
      std::vector<const char*> shards;
      for (size_t i = 0; i < tensors[t].ranks.size(); ++i) {
        shards.push_back(buffer_of_rank(tensors[t].ranks[i]) + starts[t][i]);
      }
      assemble_boxes(tensors[t].plan->boxes().boxes, shards, tensors[t].full);
    }
  };

  if (largest(bytes_of_rank) <= kMessageBytes) {
    pack(group.begin());
    group.post(Act::kGather, hash);
    if (me != 0) return;
    unpack([&](int64_t r) { return group.message(r); }, [](const Gathered&) { return true; });
    wait_for_all(group);
    return;
  }

  const Arena& arena = Arena::of_process();
  std::vector<char*> in_arena;
  const auto lies_in_arena = [&](const Gathered& tensor) {
    return arena.place_of(tensor.full, tensor.plan->boxes().full_bytes).segment >= 0;
  };
  auto* mine = reinterpret_cast<Place*>(group.begin());
  if (me == 0) {
    for (size_t t = 0; t < tensors.size(); ++t) {
      mine[t] = arena.place_of(tensors[t].full, tensors[t].plan->boxes().full_bytes);
      if (mine[t].segment >= 0) in_arena.push_back(tensors[t].full);
    }
  }
  Open open(in_arena);
  group.post(Act::kGather, hash);
  const auto* places = reinterpret_cast<const Place*>(group.message(0));
  bool streams = false;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const Gathered& tensor = tensors[t];
    streams = streams || places[t].segment < 0;
    const int64_t i = place_in(tensor);
    if (i < 0 || places[t].segment < 0) continue;
    char* full = me == 0 ? tensor.full : group.peer(0, places[t], tensor.plan->boxes().full_bytes);
    write_into(*tensor.plan, i, tensor.shard, {full});
  }
  if (streams) {
    Bytes packed(new char[std::max<int64_t>(1, bytes_of_rank[me])]);
    pack(packed.get());
    std::vector<Bytes> all;
    stream(group, packed.get(), bytes_of_rank, me == 0 ? &all : nullptr);
    if (me == 0) {
      unpack([&](int64_t r) { return static_cast<const char*>(all[r].get()); },
             [&](const Gathered& tensor) { return !lies_in_arena(tensor); });
    }
  }
  group.begin();
  group.post(Act::kDone, hash);
  if (me == 0) wait_for_all(group);
  open.done();
}

namespace {

// `use(data)` with rank 0's bytes, wherever they are; on rank 0 itself too.
template <typename Use>
void from_first(Group& group, const char* first, int64_t bytes, uint64_t detail, const Use& use) {
  const bool is_first = group.rank() == 0;
  char* message = group.begin();
  if (bytes <= kMessageBytes) {
    if (is_first && bytes > 0) std::memcpy(message, first, bytes);
    group.post(Act::kFromFirst, detail);
    use(is_first ? first : group.message(0));
    return;
  }
  Arena& arena = Arena::of_process();
  char* leased = nullptr;
  if (is_first) {
    Place place = arena.place_of(first, bytes);
    if (place.segment < 0 && (leased = arena.lease(bytes)) != nullptr) {
      detail::stream(leased, first, bytes);
      detail::finish_streaming();
      place = arena.place_of(leased, bytes);
    }
    std::memcpy(message, &place, sizeof(place));
  }
  const std::unique_ptr<char, void (*)(char*)> lease(
      leased, [](char* data) { Arena::of_process().end_lease(data); });
  group.post(Act::kFromFirst, detail);
  Place place;
  std::memcpy(&place, group.message(0), sizeof(place));
  if (place.segment >= 0) {
    use(is_first ? first : group.peer(0, place, bytes));
  } else {
    std::vector<int64_t> bytes_of_rank(group.size(), 0);
    bytes_of_rank[0] = bytes;
    std::vector<Bytes> all;
    stream(group, first, bytes_of_rank, is_first ? nullptr : &all);
    use(is_first ? first : all[0].get());
  }
  group.begin();
  group.check_unbroken();  // rank 0 may have taken its tensor back
  group.post(Act::kDone, detail);
  if (is_first) wait_for_all(group);  // they read its tensor, which may change from now on
}

}  // namespace

void scatter_from_first(Group& group, const GatherPlan& plan, const char* full, char* shard) {
  const Boxes& boxes = plan.boxes();
  std::vector<char*> shards(group.size(), nullptr);
  shards[group.rank()] = shard;
  from_first(group, full, boxes.full_bytes, plan.hash(),
             [&](const char* data) { split_boxes(boxes.boxes, data, shards); });
}

void broadcast(Group& group, const char* from, int64_t bytes, char* to) {
  from_first(group, from, bytes, bytes, [&](const char* data) {
    if (group.rank() != 0 && bytes > 0) std::memcpy(to, data, bytes);
  });
}

}  // namespace flex_model
