#include "transfer.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

namespace flex_model {
// Tensors of this process's arena that peers write to. Until it is done they are retired: if the
// transfer fails, in whichever way, a peer that is late may write yet, and nobody else shall have
// their memory then.
class Offer {
 public:
  explicit Offer(std::vector<char*> tensors) : tensors_(std::move(tensors)) {
    for (char* tensor : tensors_) Arena::of_process().retire(tensor);
  }
  void done() {
    for (char* tensor : tensors_) Arena::of_process().reinstate(tensor);
  }

 private:
  std::vector<char*> tensors_;
};

namespace {

using Bytes = std::unique_ptr<char[]>;

// The largest shards that travel inside messages to every rank: larger ones are written once, where
// they are to be, for less than the second copy costs.
constexpr int64_t kInlineBytes = 16 << 10;

int64_t largest(const std::vector<int64_t>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

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

Owned lease(int64_t bytes) {
  Arena& arena = Arena::of_process();
  char* data = arena.lease(bytes);
  if (data == nullptr) return {nullptr, nullptr};
  return {data, {data, [&arena](char* leased) { arena.end_lease(leased); }}};
}

namespace {

// Memory of this process, out of its arena if there is room.
Owned own_memory(int64_t bytes) {
  Owned leased = lease(bytes);
  if (leased.data != nullptr) return leased;
  constexpr auto kAlignment = std::align_val_t(64);  // as torch's own: results may depend on it
  void* data = ::operator new(std::max<int64_t>(1, bytes), kAlignment);
  return {static_cast<char*>(data), {data, [](void* at) { ::operator delete(at, kAlignment); }}};
}

// Whose lease everyone's views are of.
constexpr int64_t kHome = 0;

// A view of the first rank's lease, that `reader` reads; a copy where that can't be had.
Owned view_of(Group& group, const Place& home, int64_t bytes,
              std::unique_ptr<Group::Reader> reader) {
  struct View {
    std::shared_ptr<Views> views;
    char* data;
    std::unique_ptr<Group::Reader> reader;  // leaves after the view
    ~View() { views->give_back(data); }
  };
  try {
    const std::shared_ptr<Views> views = group.views(kHome, home);
    if (char* data = views->take(home.offset, bytes)) {
      return {data, std::shared_ptr<View>(new View{views, data, std::move(reader)})};
    }
  } catch (const std::runtime_error&) {  // no room for one more mapping
  }
  Owned copy = own_memory(bytes);
  std::memcpy(copy.data, group.peer(kHome, home, bytes), bytes);
  return copy;
}

// One all_gather of tensors that are too large for a message.
class LargeAllGather {
 public:
  LargeAllGather(Group& group, const GatherPlan& plan, const char* shard,
                 const std::vector<char*>& fulls, int64_t num_views);

  // The steps, in this order.
  void meet();  // finds out where everyone's tensors are
  void write();
  void end();  // returns when all have written
  std::vector<Owned> views();

 private:
  // What a rank tells of the tensors that it wants.
  struct Wanted {
    int64_t num_places;    // its own in its arena; they follow
    int64_t num_streamed;  // its own elsewhere
    int64_t num_views;
    int64_t shared;  // of the first rank: the number of its lease for views, -1 if it has none
    Place home;      // and where that is
  };
  static constexpr int64_t kMaxPlaces = (kMessageBytes - sizeof(Wanted)) / sizeof(Place);

  void want(char* full);
  void tell(int64_t num_views);
  void hear();
  bool has_home() const { return home_.shared >= 0; }
  int64_t bytes() const { return plan_.boxes().full_bytes; }

  Group& group_;
  const GatherPlan& plan_;
  const char* shard_;
  int64_t num_views_;
  std::vector<char*> in_arena_, elsewhere_;
  std::vector<char*> targets_;                  // of all ranks, as this one writes to them
  Wanted home_{};                               // the first rank's
  int64_t num_streamed_ = 0, num_readers_ = 0;  // of all ranks
  std::unique_ptr<Group::Reader> writer_;       // of the first rank's lease: keeps it
  std::unique_ptr<Offer> offer_;
  std::vector<Owned> own_views_;  // where there is no home
};

LargeAllGather::LargeAllGather(Group& group, const GatherPlan& plan, const char* shard,
                               const std::vector<char*>& fulls, int64_t num_views)
    : group_(group), plan_(plan), shard_(shard), num_views_(num_views) {
  if (static_cast<int64_t>(fulls.size()) + num_views > kMaxPlaces) {
    throw std::length_error("all_gather");
  }
  for (char* full : fulls) want(full);
}

void LargeAllGather::want(char* full) {
  const bool is_pooled = Arena::of_process().place_of(full, bytes()).segment >= 0;
  (is_pooled ? in_arena_ : elsewhere_).push_back(full);
}

void LargeAllGather::meet() {
  tell(num_views_);
  hear();
  if (has_home() || num_readers_ == 0) return;
  // The first rank has no room, or wants no view itself: all meet once more, each view a tensor of
  // its own.
  for (int64_t i = 0; i < num_views_; ++i) {
    own_views_.push_back(own_memory(bytes()));
    want(own_views_.back().data);
  }
  tell(0);
  hear();
}

void LargeAllGather::tell(int64_t num_views) {
  Arena& arena = Arena::of_process();
  char* message = group_.begin();
  Wanted mine{static_cast<int64_t>(in_arena_.size()),
              static_cast<int64_t>(elsewhere_.size()),
              num_views,
              -1,
              {}};
  std::vector<char*> offered = in_arena_;
  if (group_.rank() == kHome && num_views > 0) {
    const Arena::Shared lease = arena.lease_shared(bytes());
    if (lease.data != nullptr) {
      writer_ = group_.reader(kHome, lease.number);
      offered.push_back(lease.data);
      mine.shared = lease.number;
      mine.home = arena.place_of(lease.data, bytes());
    }
  }
  std::memcpy(message, &mine, sizeof(mine));
  auto* places = reinterpret_cast<Place*>(message + sizeof(mine));
  for (char* full : in_arena_) *places++ = arena.place_of(full, bytes());
  offer_ = std::make_unique<Offer>(std::move(offered));
  group_.post(Act::kAllGather, plan_.hash());
}

void LargeAllGather::hear() {
  const int64_t me = group_.rank(), size = group_.size();
  targets_.clear();
  num_streamed_ = num_readers_ = 0;
  for (int64_t k = 0; k < size; ++k) {  // one's own first: each rank begins at another place
    const int64_t r = (me + k) % size;
    const char* told = group_.message(r);
    Wanted theirs;
    std::memcpy(&theirs, told, sizeof(theirs));
    num_streamed_ += theirs.num_streamed;
    num_readers_ += theirs.num_views;
    if (r == kHome) home_ = theirs;
    if (r == me) {
      targets_.insert(targets_.end(), in_arena_.begin(), in_arena_.end());
      continue;
    }
    const auto* their_places = reinterpret_cast<const Place*>(told + sizeof(theirs));
    for (int64_t i = 0; i < theirs.num_places; ++i) {
      targets_.push_back(group_.peer(r, their_places[i], bytes()));
    }
  }
  if (has_home()) targets_.push_back(group_.peer(kHome, home_.home, bytes()));
}

void LargeAllGather::write() {
  write_into(plan_, group_.rank(), shard_, targets_);
  if (num_streamed_ == 0) return;
  const Boxes& boxes = plan_.boxes();
  std::vector<Bytes> all;
  stream(group_, shard_, boxes.shard_bytes, elsewhere_.empty() ? nullptr : &all);
  std::vector<const char*> shards;
  for (const Bytes& bytes : all) shards.push_back(bytes.get());
  for (char* full : elsewhere_) assemble_boxes(boxes.boxes, shards, full);
}

void LargeAllGather::end() {
  group_.begin();
  if (writer_ != nullptr) {  // before any of them can leave
    Arena::of_process().own_table().readers[home_.shared].fetch_add(
        static_cast<int32_t>(num_readers_));
  }
  group_.post(Act::kDone, plan_.hash());
  wait_for_all(group_);
  offer_->done();
}

std::vector<Owned> LargeAllGather::views() {
  if (!has_home()) return std::move(own_views_);
  std::vector<std::unique_ptr<Group::Reader>> readers;  // all of them, whatever is thrown below
  for (int64_t i = 0; i < num_views_; ++i) readers.push_back(group_.reader(kHome, home_.shared));
  std::vector<Owned> views;
  for (auto& reader : readers) {
    views.push_back(view_of(group_, home_.home, bytes(), std::move(reader)));
  }
  return views;
}

}  // namespace

std::vector<Owned> all_gather(Group& group, const GatherPlan& plan, const char* shard,
                              const std::vector<char*>& fulls, int64_t num_views) {
  const Boxes& boxes = plan.boxes();
  if (largest(boxes.shard_bytes) > kInlineBytes) {
    LargeAllGather gather(group, plan, shard, fulls, num_views);
    gather.meet();
    gather.write();
    gather.end();
    return gather.views();
  }
  std::vector<Owned> views;
  for (int64_t i = 0; i < num_views; ++i) views.push_back(own_memory(boxes.full_bytes));
  const int64_t me = group.rank(), size = group.size();
  char* message = group.begin();
  if (boxes.shard_bytes[me] > 0) std::memcpy(message, shard, boxes.shard_bytes[me]);
  group.post(Act::kAllGather, plan.hash());
  std::vector<const char*> shards(size);
  for (int64_t r = 0; r < size; ++r) shards[r] = r == me ? shard : group.message(r);
  for (char* full : fulls) assemble_boxes(boxes.boxes, shards, full);
  for (const Owned& view : views) assemble_boxes(boxes.boxes, shards, view.data);
  return views;
}

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
      bytes_of_rank.at(tensor.ranks[i]) += tensor.plan->boxes().shard_bytes.at(i);
    }
    hash_ = hash_ * 0x9e3779b97f4a7c15 + tensor.plan->hash();
  }
  is_small_ = largest(bytes_of_rank) <= kMessageBytes;
  if (!is_small_) meet();
}

OpenGather::~OpenGather() = default;

// The place of this rank's shard in the plan; -1 if it has none.
int64_t OpenGather::place_of_me(size_t tensor) const {
  const std::vector<int64_t>& ranks = tensors_[tensor].ranks;
  const auto found = std::find(ranks.begin(), ranks.end(), group_.rank());
  return found == ranks.end() ? -1 : found - ranks.begin();
}

// Finds the targets, by as many messages as their places take.
void OpenGather::meet() {
  const Arena& arena = Arena::of_process();
  const bool is_first = group_.rank() == 0;
  std::vector<Place> places;
  if (is_first) {
    std::vector<char*> in_arena;
    for (const Gathered& tensor : tensors_) {
      places.push_back(arena.place_of(tensor.full, tensor.plan->boxes().full_bytes));
      if (places.back().segment >= 0) in_arena.push_back(tensor.full);
    }
    offer_ = std::make_unique<Offer>(std::move(in_arena));
  }
  const size_t max_places = kMessageBytes / sizeof(Place);
  for (size_t first = 0; first < tensors_.size(); first += max_places) {
    const size_t count = std::min(max_places, tensors_.size() - first);
    char* message = group_.begin();
    if (is_first) std::memcpy(message, &places[first], count * sizeof(Place));
    group_.post(Act::kGather, hash_);
    const auto* told = reinterpret_cast<const Place*>(group_.message(0));
    for (size_t t = first; t < first + count; ++t) {
      const Place& place = told[t - first];
      has_place_[t] = place.segment >= 0;
      if (!has_place_[t] || place_of_me(t) < 0) continue;
      if (is_first) {
        targets_[t] = {tensors_[t].full, arena.segment_of(tensors_[t].full)};
      } else {
        const int64_t bytes = tensors_[t].plan->boxes().full_bytes;
        targets_[t].full = group_.peer(0, place, bytes, &targets_[t].segment);
      }
    }
  }
}

void OpenGather::end(const std::vector<const char*>& shards) {
  for (size_t t = 0; t < tensors_.size(); ++t) {
    const int64_t i = place_of_me(t);
    const bool is_needed =
        i >= 0 && targets_[t].full == nullptr && tensors_[t].plan->boxes().shard_bytes[i] > 0;
    if (shards.size() != tensors_.size() || (is_needed && shards[t] == nullptr)) {
      throw std::invalid_argument("OpenGather.end: a shard that has no target is missing");
    }
  }
  for (size_t t = 0; t < tensors_.size(); ++t) {
    if (targets_[t].full == nullptr || shards[t] == nullptr) continue;
    write_into(*tensors_[t].plan, place_of_me(t), shards[t], {targets_[t].full});
  }
  const bool streams = std::find(has_place_.begin(), has_place_.end(), false) != has_place_.end();
  if (streams) move_through_messages(shards);
  if (is_small_) return;
  group_.begin();
  group_.post(Act::kDone, hash_);
  if (group_.rank() != 0) return;
  wait_for_all(group_);
  offer_->done();
}

// What has no place, packed, in one message where all is small.
void OpenGather::move_through_messages(const std::vector<const char*>& shards) {
  // Of each rank: the bytes of all its shards, and where each shard begins among them.
  std::vector<int64_t> bytes_of_rank(group_.size(), 0);
  std::vector<std::vector<int64_t>> starts(tensors_.size());
  for (size_t t = 0; t < tensors_.size(); ++t) {
    for (size_t i = 0; !has_place_[t] && i < tensors_[t].ranks.size(); ++i) {
      starts[t].push_back(bytes_of_rank[tensors_[t].ranks[i]]);
      bytes_of_rank[tensors_[t].ranks[i]] += tensors_[t].plan->boxes().shard_bytes[i];
    }
  }
  const auto pack = [&](char* to) {
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const int64_t i = place_of_me(t);
      if (has_place_[t] || i < 0) continue;
      const int64_t bytes = tensors_[t].plan->boxes().shard_bytes[i];
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
      assemble_boxes(tensors_[t].plan->boxes().boxes, from, tensors_[t].full);
    }
  };
  const bool is_first = group_.rank() == 0;
  if (is_small_) {
    pack(group_.begin());
    group_.post(Act::kGather, hash_);
    if (!is_first) return;
    unpack([&](int64_t r) { return group_.message(r); });
    wait_for_all(group_);
    return;
  }
  Bytes packed(new char[std::max<int64_t>(1, bytes_of_rank[group_.rank()])]);
  pack(packed.get());
  std::vector<Bytes> all;
  stream(group_, packed.get(), bytes_of_rank, is_first ? &all : nullptr);
  if (is_first) unpack([&](int64_t r) { return static_cast<const char*>(all[r].get()); });
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
