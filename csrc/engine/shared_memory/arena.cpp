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

}  // namespace

Arena& Arena::of_process() {
  // Never destroyed: tensors may outlive everything else at exit.
  static Arena* arena = [] {
    auto* made = new Arena;
    pthread_atfork([] { of_process().before_fork(); }, [] { of_process().after_fork_in_parent(); },
                   [] { of_process().after_fork_in_child(); });
    return made;
  }();
  return *arena;
}

char* Arena::lease(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return take(bytes, kAlignment, false);
}

Arena::Shared Arena::lease_shared(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!has_peers_) return {};
  end_unread();
  // Numbers are reused, lowest first: peers know a lease by its number and its entry in the table.
  int64_t number = 0;
  for (auto used = shared_.begin(); used != shared_.end() && used->first == number; ++used) {
    ++number;
  }
  if (number >= ArenaTable::kMaxShared) return {};
  // Whole pages: each reader maps them, and writes to its own copies only.
  char* data = take(round_up(std::max<int64_t>(bytes, 1), page_bytes()), page_bytes(), true);
  if (data == nullptr) return {};
  shared_[number] = data;
  own_table().readers[number].store(1, std::memory_order_release);
  return {data, number};
}

void ArenaTable::release_reader(int64_t shared) {
  if (readers[shared].fetch_sub(1, std::memory_order_acq_rel) == 1) {
    num_unread.fetch_add(1, std::memory_order_release);
  }
}

// Ends the shared leases that have no reader.
void Arena::end_unread() {
  if (shared_.empty() || is_forked_) return;
  // The counter changes when a lease loses its last reader; else nothing has to be searched.
  const int64_t num_unread = own_table().num_unread.load(std::memory_order_acquire);
  if (num_unread == num_unread_) return;
  num_unread_ = num_unread;
  for (auto each = shared_.begin(); each != shared_.end();) {
    if (own_table().readers[each->first].load(std::memory_order_acquire) > 0) {
      ++each;
      continue;
    }
    char* data = each->second;
    each = shared_.erase(each);
    if (data != nullptr) end(data);
  }
}

char* Arena::take(int64_t bytes, int64_t alignment, bool is_shared) {
  if (bytes < 0 || bytes > machine_bytes() || !has_peers_) return nullptr;
  end_unread();
  bytes = round_up(std::max<int64_t>(bytes, 1), kAlignment);
  // The smallest that fits once its beginning is rounded up.
  const auto find_free = [&] {
    auto found = free_.lower_bound({bytes, -1, -1});
    while (found != free_.end() &&
           round_up(found->offset, alignment) + bytes > found->offset + found->bytes) {
      ++found;
    }
    return found;
  };
  auto found = find_free();
  if (found == free_.end()) {
    if (!grow(bytes)) return nullptr;
    found = find_free();
  }
  const FreePart whole = *found;
  free_.erase(found);
  Held& held = *held_[whole.segment];
  const int64_t offset = round_up(whole.offset, alignment);
  const auto leave_free = [&](int64_t begin, int64_t end) {
    if (begin == end) return;
    held.parts[begin] = {end - begin, true, false};
    free_.insert({end - begin, whole.segment, begin});
  };
  leave_free(whole.offset, offset);
  leave_free(offset + bytes, whole.offset + whole.bytes);
  held.parts[offset] = {bytes, false, false, is_shared};
  leased_bytes_ += bytes;
  return held.segment.data() + offset;
}

void Arena::end_lease(char* data) {
  const std::lock_guard<std::mutex> lock(mutex_);
  end(data);
}

void Arena::end(char* data) {
  int64_t index;
  Held* held = find(data, &index);
  auto part = held->parts.find(data - held->segment.data());
  leased_bytes_ -= part->second.bytes;
  // A late peer of a failed transfer may still write here: the memory is never used again. It
  // stays a part of its segment, which is not freed before the process ends either.
  if (part->second.is_retired) return;
  // Joined with its free neighbours, so that large leases find room again: no two free parts of a
  // segment touch.
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
  // `data` may be anywhere in its lease, as a view of a tensor is.
  auto part = std::prev(held->parts.upper_bound(data - held->segment.data()));
  part->second.is_retired = is_retired;
}

void Arena::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_forked_) return;
  end_unread();
  has_peers_ = false;
  for (size_t i = 0; i < held_.size(); ++i) give_back_if_free(i);
}

// A shared lease does not keep its segment: views are mappings of their own, and the kernel frees
// the memory with the last of them, even where a process is killed before it releases its reader.
void Arena::give_back_if_free(size_t index) {
  if (!held_[index]) return;
  Held& held = *held_[index];
  for (const auto& [offset, part] : held.parts) {
    if (!part.is_free && (part.is_retired || !part.is_shared)) return;
  }
  for (const auto& [offset, part] : held.parts) {
    if (part.is_free) free_.erase({part.bytes, static_cast<int64_t>(index), offset});
    if (!part.is_free) leased_bytes_ -= part.bytes;
  }
  for (auto& [number, data] : shared_) {
    if (data >= held.segment.data() && data < held.segment.data() + held.segment.bytes()) {
      data = nullptr;
    }
  }
  held_bytes_ -= held.segment.bytes();
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

MemoryRange Arena::segment_of(const char* data) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t index;
  const Held* held = find(data, &index);
  return held == nullptr ? MemoryRange{} : held->segment.range();
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
    table_.keep_from_children();
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

int64_t Arena::leased_bytes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  end_unread();
  return leased_bytes_;
}

// Adds a segment of at least `bytes` bytes; each is as large as all before it together, so that
// there are few.
bool Arena::grow(int64_t bytes) {
  // The entry of a freed segment is reused: no current peer has opened that segment.
  const int64_t number = std::find(held_.begin(), held_.end(), nullptr) - held_.begin();
  if (number >= ArenaTable::kMaxSegments) return false;
  int64_t size = round_up(std::max({bytes, kSmallestSegment, std::min(held_bytes_, kLargestStep)}),
                          kSmallestSegment);
  // Half of what is free: the other half is the model's, and that of the other ranks of this host.
  const int64_t allowed =
      std::min(limit_ < 0 ? machine_bytes() : limit_ - held_bytes_, free_machine_bytes() / 2);
  if (size > allowed) size = round_up(bytes, page_bytes());
  if (size > allowed) return false;
  auto held = std::make_unique<Held>();
  try {
    held->segment = Segment::create(size);
  } catch (const std::runtime_error&) {
    return false;
  }
  // The entry before the number of entries, which releases it to peers.
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

// Locked from here on in both processes, since the child copies what the locks protect.
void Arena::before_fork() {
  mutex_.lock();
  gate_.before(leased_bytes_ > 0 && !is_forked_);
}

void Arena::after_fork_in_parent() {
  gate_.in_parent();
  mutex_.unlock();
}

void Arena::after_fork_in_child() noexcept {
  detach();
  gate_.in_child();
  mutex_.unlock();
}

// The child keeps the contents of its tensors, as after any fork, in private memory: neither
// process sees the other's later writes, nor does the child see those of the parent's peers.
void Arena::detach() noexcept {
  is_forked_ = true;
  has_peers_ = false;
  for (const auto& held : held_) {
    if (!held) continue;
    held->segment.detach([&](char* copy) {
      for (const auto& [offset, part] : held->parts) {
        if (part.is_free || part.is_shared) continue;  // views are copied: see CowMapping::detach
        std::memcpy(copy + offset, held->segment.data() + offset, part.bytes);
      }
    });
  }
}

}  // namespace flex_model
