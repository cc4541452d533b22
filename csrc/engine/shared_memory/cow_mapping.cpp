#include "cow_mapping.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <set>
#include <stdexcept>

#include "fork_gate.h"
#include "machine.h"

namespace flex_model {
namespace {

// All mappings of this process, and the lock of what is in them, which fork() needs together. Never
// destroyed: tensors may outlive everything else.
struct Registry {
  std::mutex mutex;
  std::set<CowMapping*> mappings;
  ForkGate gate;
};
Registry& registry() {
  static auto* made = new Registry;
  return *made;
}

std::atomic<bool> tracking_disabled{false};

// Whether one of the ranges, which do not overlap, has bytes in common with this one.
bool overlap(const std::map<int64_t, int64_t>& ranges, int64_t offset, int64_t bytes) {
  const auto next = ranges.lower_bound(offset);
  if (next != ranges.end() && next->first < offset + bytes) return true;
  return next != ranges.begin() && std::prev(next)->first + std::prev(next)->second > offset;
}

// Tests on two pages that a view shows others' writes until this process writes to it, and again
// after give_back().
bool works(bool may_track) {
  const int64_t page = page_bytes();
  try {
    const Segment segment = Segment::create(2 * page);
    CowMapping mapping(segment.address(), may_track);
    char& shared = segment.data()[page];
    for (char round = 0; round < 3; ++round) {  // the last one after one without a write
      shared = 1;
      char* view = mapping.take(0, 2 * page);
      if (view == nullptr || view[page] != 1 || mapping.is_written(view)) return false;
      shared = 2;
      if (view[page] != 2 || mapping.is_written(view)) return false;
      if (round < 2) view[page] = 3;
      if (shared != 2 || mapping.is_written(view) != (round < 2)) return false;
      mapping.give_back(view);
    }
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

}  // namespace

int64_t CowMapping::worthwhile_bytes() {
  if (tracks_writes()) return 1 << 20;  // from there on, copies don't stay in the cache
  static const bool has_views = works(false);
  return has_views ? 4 << 20 : -1;
}

bool CowMapping::tracks_writes() {
  static const bool can_track = works(true);
  return can_track && !tracking_disabled;
}

void CowMapping::disable_tracking(bool without) { tracking_disabled = without; }

CowMapping::Layer::Layer(const SegmentAddress& segment, bool may_track)
    : mapping(Segment::open_private(segment)), writes(mapping.data(), mapping.bytes(), may_track) {}

CowMapping::CowMapping(const SegmentAddress& segment, bool may_track)
    : address_(segment), may_track_(may_track), pid_(getpid()) {
  static const int failed =
      pthread_atfork(&before_fork, &after_fork_in_parent, [] { after_fork_in_child(); });
  if (failed != 0) throw std::runtime_error("shared memory: pthread_atfork");
  layers_.push_back(std::make_unique<Layer>(segment, may_track));
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().mappings.insert(this);
}

CowMapping::~CowMapping() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().mappings.erase(this);
}

char* CowMapping::take(int64_t offset, int64_t bytes) {
  bytes = round_up(bytes, page_bytes());
  const std::lock_guard<std::mutex> lock(registry().mutex);
  // Views of one range at the same time, such as two copies for one rank, need a mapping each: what
  // is written to one must not show in the other.
  const auto found = std::find_if(layers_.begin(), layers_.end(), [&](const auto& layer) {
    return !overlap(layer->taken, offset, bytes);
  });
  Layer* layer = nullptr;
  const bool is_new = found == layers_.end();
  if (!is_new) {
    layer = found->get();
  } else {
    try {
      layers_.push_back(std::make_unique<Layer>(address_, may_track_));
    } catch (const std::runtime_error&) {
      return nullptr;
    }
    layer = layers_.back().get();
  }
  char* data = layer->mapping.data() + offset;
  // Leases come back at the same places, and most views are not written to. Then the pages are
  // still tracked from the last time, and a system call is saved.
  int64_t& begun = layer->clean[offset];  // 0 bytes at first
  // mlockall copies all pages of private mappings at that time.
  if (begun > 0 && layer->writes.any(data, std::min(begun, bytes))) begun = 0;
  if (begun < bytes) {
    if (!layer->writes.begin(data + begun, bytes - begun)) {
      layer->clean.erase(offset);
      if (is_new) layers_.pop_back();
      return nullptr;
    }
    begun = bytes;
  }
  layer->taken[offset] = bytes;
  return data;
}

bool CowMapping::is_written(const char* view) const {
  const Found found = find(view);
  return found.layer->writes.any(view, found.bytes);
}

void CowMapping::give_back(char* view) {
  if (getpid() != pid_) return;
  const Found found = find(view);
  // Without the lock: no other view has these pages yet.
  const bool written = found.layer->writes.any(view, found.bytes);
  if (written && !WrittenPages::drop(view, found.bytes)) return;  // its range is never reused
  const std::lock_guard<std::mutex> lock(registry().mutex);
  RangeMap& clean = found.layer->clean;
  for (auto each = clean.begin(); written && each != clean.end();) {
    const bool overlaps = overlap({*each}, found.offset, found.bytes);
    each = overlaps ? clean.erase(each) : std::next(each);
  }
  found.layer->taken.erase(found.offset);
}

CowMapping::Found CowMapping::find(const char* view) const {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  for (const auto& layer : layers_) {
    const int64_t offset = view - layer->mapping.data();
    if (offset >= 0 && offset < address_.bytes) {
      return {layer.get(), offset, layer->taken.at(offset)};
    }
  }
  throw std::logic_error("CowMapping: not one of its views");
}

// As in Arena: locked from here on in both processes.
void CowMapping::before_fork() {
  registry().mutex.lock();
  bool copies = false;
  for (const CowMapping* each : registry().mappings) {
    for (const auto& layer : each->layers_) copies = copies || !layer->taken.empty();
  }
  registry().gate.before(copies);
}

void CowMapping::after_fork_in_parent() {
  registry().gate.in_parent();
  registry().mutex.unlock();
}

void CowMapping::after_fork_in_child() noexcept {
  for (CowMapping* each : registry().mappings) each->detach();
  registry().mappings.clear();
  registry().gate.in_child();
  registry().mutex.unlock();
}

// The child keeps the contents of its tensors in private memory: the parent and its peers go on
// writing to the segment.
void CowMapping::detach() noexcept {
  for (const auto& layer : layers_) {
    layer->mapping.detach([&](char* copy) {
      for (const auto& [offset, bytes] : layer->taken) {
        std::memcpy(copy + offset, layer->mapping.data() + offset, bytes);
      }
    });
  }
}

}  // namespace flex_model
