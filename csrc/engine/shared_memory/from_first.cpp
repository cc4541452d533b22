#include <cstring>
#include <vector>

#include "messages.h"
#include "transfer.h"

namespace flex_model {
namespace {

// Calls `use(data)` with rank 0's bytes on every rank, rank 0 included.
template <typename Use>
void from_first(Group& group, const char* first, int64_t bytes, uint64_t detail, const Use& use) {
  const bool is_first = group.rank() == 0;
  char* message = group.begin();
  if (bytes <= kMessageBytes) {
    if (is_first && bytes > 0) std::memcpy(message, first, bytes);
    group.post(Op::kFromFirst, detail);
    use(is_first ? first : group.message(0));
    return;
  }
  Arena& arena = Arena::of_process();
  Owned copy{};
  if (is_first) {
    Place place = arena.place_of(first, bytes);
    // Peers reach the arena only: a tensor elsewhere is copied there once, and read by all.
    if (place.segment < 0) copy = lease(bytes);
    if (copy.data != nullptr) {
      detail::stream(copy.data, first, bytes);
      detail::finish_streaming();
      place = arena.place_of(copy.data, bytes);
    }
    std::memcpy(message, &place, sizeof(place));
  }
  group.post(Op::kFromFirst, detail);
  Place place;
  std::memcpy(&place, group.message(0), sizeof(place));
  if (place.segment >= 0) {
    use(is_first ? first : group.peer(0, place, bytes));
  } else {  // the arena is full
    std::vector<int64_t> bytes_of_rank(group.size(), 0);
    bytes_of_rank[0] = bytes;
    std::vector<Bytes> all;
    stream(group, first, bytes_of_rank, is_first ? nullptr : &all);
    use(is_first ? first : all[0].get());
  }
  group.begin();
  group.check_unbroken();  // after an abort, rank 0 may have reused its tensor while `use` read it
  group.post(Op::kDone, detail);
  if (is_first) wait_for_all(group);  // they have read its tensor, which may change from now on
}

}  // namespace

void scatter_from_first(Group& group, const GatherPlan& plan, const char* full, char* shard) {
  const BoxPlan& box_plan = plan.box_plan();
  std::vector<char*> shards(group.size(), nullptr);
  shards[group.rank()] = shard;
  from_first(group, full, box_plan.full_bytes, plan.hash(),
             [&](const char* data) { split_boxes(box_plan.boxes, data, shards); });
}

void broadcast(Group& group, const char* from, int64_t bytes, char* to) {
  from_first(group, from, bytes, bytes, [&](const char* data) {
    if (group.rank() != 0 && bytes > 0) std::memcpy(to, data, bytes);
  });
}

}  // namespace flex_model
