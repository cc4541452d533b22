#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "in_flight_targets.h"
#include "messages.h"
#include "transfer.h"

namespace flex_model {
namespace {

// The largest shards that are sent inside messages. A larger one is written directly into every
// rank's full tensor, which costs less than the second copy out of a message.
constexpr int64_t kInlineBytes = 16 << 10;

// The rank whose lease all ranks' views show.
constexpr int64_t kHome = 0;

// A view of the first rank's lease, counted by `reader`; a copy where no mapping can be made.
Owned view_of(Group& group, const Place& home, int64_t bytes, Group::Reader reader) {
  struct View {
    std::shared_ptr<CowMapping> views;
    char* data;
    Group::Reader reader;  // released after the view
    ~View() { views->give_back(data); }
  };
  try {
    const std::shared_ptr<CowMapping> views = group.views(kHome, home);
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
//
// Each rank writes its shard straight to its place in every rank's full tensors, so that a byte is
// copied once per full tensor and no rank reads another's shard. Full tensors that are expected to
// be read only are one lease of the first rank, which all ranks map copy-on-write: that one is
// written once for all of them. Tensors outside of the arena can't be reached by peers, and get
// their shards through messages.
class LargeAllGather {
 public:
  LargeAllGather(Group& group, const GatherPlan& plan, const char* shard,
                 const std::vector<char*>& fulls, int64_t num_views);

  // The steps, in this order.
  void exchange_targets();  // collects the addresses of all ranks' tensors
  void write();
  void end();  // returns when all have written
  std::vector<Owned> views();

 private:
  // A rank's message: the full tensors that it receives.
  struct Targets {
    int64_t num_places;    // its own in its arena; they follow
    int64_t num_streamed;  // its own elsewhere
    int64_t num_views;
    int64_t shared;  // of the first rank: the number of its lease for views, -1 if it has none
    Place home;      // and where that is
  };
  static constexpr int64_t kMaxPlaces = (kMessageBytes - sizeof(Targets)) / sizeof(Place);

  void add_full(char* full);
  void post_targets(int64_t num_views);
  void read_targets();
  bool has_home() const { return home_.shared >= 0; }
  int64_t bytes() const { return plan_.box_plan().full_bytes; }

  Group& group_;
  const GatherPlan& plan_;
  const char* shard_;
  int64_t num_views_;
  std::vector<char*> in_arena_, elsewhere_;
  std::vector<char*> targets_;                  // of all ranks, as this one writes to them
  Targets home_{};                              // the first rank's
  int64_t num_streamed_ = 0, num_readers_ = 0;  // of all ranks
  Group::Reader writer_;                        // of the first rank's lease: keeps it alive
  std::unique_ptr<InFlightTargets> in_flight_;
  std::vector<Owned> own_views_;  // where there is no home
};

LargeAllGather::LargeAllGather(Group& group, const GatherPlan& plan, const char* shard,
                               const std::vector<char*>& fulls, int64_t num_views)
    : group_(group), plan_(plan), shard_(shard), num_views_(num_views) {
  if (static_cast<int64_t>(fulls.size()) + num_views > kMaxPlaces) {
    throw std::length_error("all_gather");
  }
  for (char* full : fulls) add_full(full);
}

void LargeAllGather::add_full(char* full) {
  // The caller may have got memory elsewhere: where the arena was full, or for small tensors.
  const bool is_pooled = Arena::of_process().place_of(full, bytes()).segment >= 0;
  (is_pooled ? in_arena_ : elsewhere_).push_back(full);
}

void LargeAllGather::exchange_targets() {
  post_targets(num_views_);
  read_targets();
  if (has_home() || num_readers_ == 0) return;
  // The first rank has no room, or needs no view itself: a second round, in which each view is a
  // tensor of the rank's own.
  for (int64_t i = 0; i < num_views_; ++i) {
    own_views_.push_back(own_memory(bytes()));
    add_full(own_views_.back().data);
  }
  post_targets(0);
  read_targets();
}

void LargeAllGather::post_targets(int64_t num_views) {
  Arena& arena = Arena::of_process();
  char* message = group_.begin();
  Targets local{static_cast<int64_t>(in_arena_.size()),
                static_cast<int64_t>(elsewhere_.size()),
                num_views,
                -1,
                {}};
  // Peers write to these from the moment they read the message until the round of end(). A rank
  // that is late after a failure may do so even later, so they are retired before they are posted.
  std::vector<char*> offered = in_arena_;
  if (group_.rank() == kHome && num_views > 0) {
    const Arena::Shared lease = arena.lease_shared(bytes());
    if (lease.data != nullptr) {
      // Takes over the count that the lease begins with, so that it outlives the views only.
      writer_ = group_.reader(kHome, lease.number);
      offered.push_back(lease.data);
      local.shared = lease.number;
      local.home = arena.place_of(lease.data, bytes());
    }
  }
  std::memcpy(message, &local, sizeof(local));
  auto* places = reinterpret_cast<Place*>(message + sizeof(local));
  for (char* full : in_arena_) *places++ = arena.place_of(full, bytes());
  in_flight_ = std::make_unique<InFlightTargets>(std::move(offered));
  group_.post(Op::kAllGather, plan_.hash());
}

void LargeAllGather::read_targets() {
  const int64_t me = group_.rank(), size = group_.size();
  targets_.clear();
  num_streamed_ = num_readers_ = 0;
  for (int64_t k = 0; k < size;
       ++k) {  // own tensors first, so that no two ranks write to one rank at a time
    const int64_t r = (me + k) % size;
    const char* message = group_.message(r);
    Targets theirs;
    std::memcpy(&theirs, message, sizeof(theirs));
    num_streamed_ += theirs.num_streamed;
    num_readers_ += theirs.num_views;
    if (r == kHome) home_ = theirs;
    if (r == me) {  // by our own addresses, which need no mapping
      targets_.insert(targets_.end(), in_arena_.begin(), in_arena_.end());
      continue;
    }
    const auto* their_places = reinterpret_cast<const Place*>(message + sizeof(theirs));
    for (int64_t i = 0; i < theirs.num_places; ++i) {
      targets_.push_back(group_.peer(r, their_places[i], bytes()));
    }
  }
  if (has_home()) targets_.push_back(group_.peer(kHome, home_.home, bytes()));
}

void LargeAllGather::write() {
  assemble_into_each(plan_.box_plan().boxes, group_.rank(), shard_, targets_);
  // Collective: all ranks send, if any rank has a tensor that only messages reach.
  if (num_streamed_ == 0) return;
  const BoxPlan& box_plan = plan_.box_plan();
  std::vector<Bytes> all;
  stream(group_, shard_, box_plan.shard_bytes, elsewhere_.empty() ? nullptr : &all);
  std::vector<const char*> shards;
  for (const Bytes& bytes : all) shards.push_back(bytes.get());
  for (char* full : elsewhere_) assemble_boxes(box_plan.boxes, shards, full);
}

void LargeAllGather::end() {
  group_.begin();
  if (writer_ != nullptr) {  // counted before any of them can be released
    Arena::of_process().own_table().readers[home_.shared].fetch_add(
        static_cast<int32_t>(num_readers_));
  }
  group_.post(Op::kDone, plan_.hash());
  // A rank posts after its last write, and the post releases what it wrote: when all have posted,
  // this rank's tensors are complete, and nobody will write to them again.
  wait_for_all(group_);
  in_flight_->done();
}

std::vector<Owned> LargeAllGather::views() {
  if (!has_home()) return std::move(own_views_);
  std::vector<Group::Reader> readers;  // all of them first: what is thrown below releases them all
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
  const BoxPlan& box_plan = plan.box_plan();
  if (largest(box_plan.shard_bytes) > kInlineBytes) {
    LargeAllGather gather(group, plan, shard, fulls, num_views);
    gather.exchange_targets();
    gather.write();
    gather.end();
    return gather.views();
  }
  // Small: every rank reads all shards out of the messages and assembles its own tensors. One
  // round, and no second one at the end: the next round's begin() protects the messages.
  std::vector<Owned> views;
  for (int64_t i = 0; i < num_views; ++i) views.push_back(own_memory(box_plan.full_bytes));
  const int64_t me = group.rank(), size = group.size();
  char* message = group.begin();
  if (box_plan.shard_bytes[me] > 0) std::memcpy(message, shard, box_plan.shard_bytes[me]);
  group.post(Op::kAllGather, plan.hash());
  std::vector<const char*> shards(size);
  for (int64_t r = 0; r < size; ++r) shards[r] = r == me ? shard : group.message(r);
  for (char* full : fulls) assemble_boxes(box_plan.boxes, shards, full);
  for (const Owned& view : views) assemble_boxes(box_plan.boxes, shards, view.data);
  return views;
}

std::vector<std::string> gather_at_once(Group& group, const std::string& header,
                                        ExceptBytes may_differ, const GatherPlan& plan,
                                        const std::vector<int64_t>& places, const char* shard,
                                        const std::vector<char*>& fulls) {
  const BoxPlan& box_plan = plan.box_plan();
  const auto own = std::find(places.begin(), places.end(), group.rank());
  const int64_t bytes = own == places.end() ? 0 : box_plan.shard_bytes[own - places.begin()];
  if (static_cast<int64_t>(header.size()) + bytes > kMessageBytes) {
    throw std::length_error("gather_at_once");
  }
  char* message = group.begin();
  std::memcpy(message, header.data(), header.size());
  if (bytes > 0) std::memcpy(message + header.size(), shard, bytes);
  group.post(Op::kExchange, header.size());  // as exchange() of a rank that sends its header alone
  std::vector<std::string> headers;
  bool are_equal = true;
  for (int64_t r = 0; r < group.size(); ++r) {
    headers.emplace_back(group.message(r), header.size());
    are_equal &= headers[r].compare(0, may_differ.from, header, 0, may_differ.from) == 0 &&
                 headers[r].compare(may_differ.to, std::string::npos, header, may_differ.to) == 0;
  }
  if (!are_equal || places.empty()) return headers;
  std::vector<const char*> shards;
  for (int64_t place : places) shards.push_back(group.message(place) + header.size());
  for (char* full : fulls) assemble_boxes(box_plan.boxes, shards, full);
  return headers;
}

}  // namespace flex_model
