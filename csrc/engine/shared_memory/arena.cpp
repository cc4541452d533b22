#include "arena.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "machine.h"

namespace flex_model {
namespace {

constexpr int64_t kAlignment = 256;                 // of leases: whole cache lines, any vector
constexpr int64_t kSmallestSegment = 16 << 20;      // in bytes
constexpr int64_t kLargestStep = int64_t{1} << 30;  // growth doubles up to it

int64_t round_up(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

Arena& Arena::of_process() {
  // Never destroyed: tensors may outlive everything else at exit.
  static Arena* arena = [] {
    auto* made = new Arena;
    pthread_atfork([] { of_process().lock_for_fork(); }, [] { of_process().unlock_after_fork(); },
                   [] {
                     of_process().detach_in_child();
                     of_process().unlock_after_fork();
                   });
    return made;
  }();
  return *arena;
}

char* Arena::lease(int64_t bytes) {
  if (bytes < 0 || bytes > machine_bytes()) return nullptr;
  bytes = round_up(std::max<int64_t>(bytes, 1), kAlignment);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!has_peers_) return nullptr;
  auto found = free_.lower_bound({bytes, -1, -1});
  if (found == free_.end()) {
    if (!grow(bytes)) return nullptr;
    found = free_.lower_bound({bytes, -1, -1});
  }
  const FreePart taken = *found;
  free_.erase(found);
  Held& held = *held_[taken.segment];
  held.parts[taken.offset] = {bytes, false, false};
  if (taken.bytes > bytes) {
    const FreePart rest{taken.bytes - bytes, taken.segment, taken.offset + bytes};
    held.parts[rest.offset] = {rest.bytes, true, false};
    free_.insert(rest);
  }
  leased_bytes_ += bytes;
  return held.segment.data() + taken.offset;
}

void Arena::end_lease(char* data) {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t index;
  Held* held = find(data, &index);
  auto part = held->parts.find(data - held->segment.data());
  leased_bytes_ -= part->second.bytes;
  if (part->second.is_retired) return;
  int64_t offset = part->first, bytes = part->second.bytes;
  const auto next = std::next(part);
  if (next != held->parts.end() && next->second.is_free) {
    free_.erase({next->second.bytes, index, next->first});
    bytes += next->second.bytes;
    held->parts.erase(next);
  }
  if (part != held->parts.begin()) {
    const auto before = std::prev(part);
    if (before->second.is_free) {
      free_.erase({before->second.bytes, index, before->first});
      offset = before->first;
      bytes += before->second.bytes;
      held->parts.erase(part);
    }
  }
  held->parts[offset] = {bytes, true, false};
  free_.insert({bytes, index, offset});
  if (!has_peers_ && !is_forked_) give_back_if_free(index);
}

void Arena::set_retired(char* data, bool is_retired) {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t index;
  Held* held = find(data, &index);
  if (held == nullptr) return;
  auto part = std::prev(held->parts.upper_bound(data - held->segment.data()));
  part->second.is_retired = is_retired;
}

void Arena::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_forked_) return;
  has_peers_ = false;
  for (size_t i = 0; i < held_.size(); ++i) give_back_if_free(i);
}

void Arena::give_back_if_free(size_t index) {
  if (!held_[index] || held_[index]->parts.size() != 1) return;
  const Part& whole = held_[index]->parts.at(0);
  if (!whole.is_free) return;
  free_.erase({whole.bytes, static_cast<int64_t>(index), 0});
  held_bytes_ -= whole.bytes;
  held_[index].reset();
}

Place Arena::place_of(const char* data, int64_t bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t index;
  const Held* held = has_peers_ ? find(data, &index) : nullptr;
  if (held == nullptr) return {};
  const int64_t offset = data - held->segment.data();
  if (offset + bytes > held->segment.bytes()) return {};
  return {index, offset};
}

Stretch Arena::segment_of(const char* data) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t index;
  const Held* held = find(data, &index);
  return held == nullptr ? Stretch{} : held->segment.stretch();
}

char* Arena::at(const Place& place) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return held_.at(place.segment)->segment.data() + place.offset;
}

SegmentAddress Arena::table() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_forked_) throw std::runtime_error("shared memory: a forked process has none");
  has_peers_ = true;
  if (table_.data() == nullptr) {
    table_ = Segment::create(sizeof(ArenaTable));
    new (table_.data()) ArenaTable{};
  }
  return table_.address();
}

void Arena::set_limit(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  limit_ = bytes;
}

int64_t Arena::held_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return held_bytes_;
}

int64_t Arena::leased_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return leased_bytes_;
}

// Adds a segment that holds `bytes`; each is as large as all before, so that their number stays
// small.
bool Arena::grow(int64_t bytes) {
  // A place in the table is used again: peers of now have not seen what was there.
  const int64_t number = std::find(held_.begin(), held_.end(), nullptr) - held_.begin();
  if (number >= ArenaTable::kMaxSegments) return false;
  int64_t size = round_up(std::max({bytes, kSmallestSegment, std::min(held_bytes_, kLargestStep)}),
                          kSmallestSegment);
  const int64_t allowed =
      std::min(limit_ < 0 ? machine_bytes() : limit_ - held_bytes_, free_machine_bytes() / 2);
  if (size > allowed) size = round_up(bytes, 4096);
  if (size > allowed) return false;
  auto held = std::make_unique<Held>();
  try {
    held->segment = Segment::create(size);
  } catch (const std::runtime_error&) {
    return false;
  }
  auto* table = reinterpret_cast<ArenaTable*>(table_.data());
  table->segments[number] = held->segment.address();
  if (number == static_cast<int64_t>(held_.size())) held_.emplace_back();
  table->num_segments.store(static_cast<int64_t>(held_.size()), std::memory_order_release);
  held->parts[0] = {size, true, false};
  free_.insert({size, number, 0});
  held_[number] = std::move(held);
  held_bytes_ += size;
  return true;
}

Arena::Held* Arena::find(const char* data, int64_t* index) const {
  for (size_t i = 0; i < held_.size(); ++i) {
    if (!held_[i]) continue;
    const Segment& segment = held_[i]->segment;
    if (data >= segment.data() && data < segment.data() + segment.bytes()) {
      *index = static_cast<int64_t>(i);
      return held_[i].get();
    }
  }
  return nullptr;
}

// The child keeps what its tensors hold, as after any fork, in memory of its own: what it writes
// there the parent never sees, nor the child what the parent's peers write.
void Arena::detach_in_child() noexcept {
  is_forked_ = true;
  has_peers_ = false;
  for (const auto& held : held_) {
    if (!held) continue;
    held->segment.detach([&](char* copy) {
      for (const auto& [offset, part] : held->parts) {
        if (!part.is_free) std::memcpy(copy + offset, held->segment.data() + offset, part.bytes);
      }
    });
  }
}

}  // namespace flex_model
