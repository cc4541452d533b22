#include "views.h"

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

// All of this process, and what guards them. Never destroyed: tensors may outlive everything else.
struct Registry {
  std::mutex mutex;
  std::set<Views*> views;
  ForkGate gate;
};
Registry& registry() {
  static auto* made = new Registry;
  return *made;
}

std::atomic<bool> without_notes{false};

// Whether one of the stretches, which do not overlap, has bytes in common with this one.
bool overlap(const std::map<int64_t, int64_t>& stretches, int64_t offset, int64_t bytes) {
  const auto next = stretches.lower_bound(offset);
  if (next != stretches.end() && next->first < offset + bytes) return true;
  return next != stretches.begin() && std::prev(next)->first + std::prev(next)->second > offset;
}

// What a page shows that others write to, until it is written to here, and after it was given back.
bool try_out(bool may_take_notes) {
  if (sysconf(_SC_PAGESIZE) != kPage) return false;
  try {
    const Segment segment = Segment::create(2 * kPage);
    Views views(segment.address(), may_take_notes);
    char& shared = segment.data()[kPage];
    for (char round = 0; round < 3; ++round) {  // the last one after one without a write
      shared = 1;
      char* view = views.take(0, 2 * kPage);
      if (view == nullptr || view[kPage] != 1 || views.is_written(view)) return false;
      shared = 2;
      if (view[kPage] != 2 || views.is_written(view)) return false;
      if (round < 2) view[kPage] = 3;
      if (shared != 2 || views.is_written(view) != (round < 2)) return false;
      views.give_back(view);
    }
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

}  // namespace

int64_t Views::worthwhile_bytes() {
  if (take_notes()) return 1 << 20;  // from there on, copies don't stay in the cache
  static const bool they_work = try_out(false);
  return they_work ? 4 << 20 : -1;
}

bool Views::take_notes() {
  static const bool they_do = try_out(true);
  return they_do && !without_notes;
}

void Views::do_without_notes(bool without) { without_notes = without; }

Views::Layer::Layer(const SegmentAddress& segment, bool may_take_notes)
    : mapping(Segment::open_private(segment)),
      writes(mapping.data(), mapping.bytes(), may_take_notes) {}

Views::Views(const SegmentAddress& segment, bool may_take_notes)
    : address_(segment), may_take_notes_(may_take_notes), pid_(getpid()) {
  static const int failed =
      pthread_atfork(&before_fork, &after_fork_in_parent, [] { after_fork_in_child(); });
  if (failed != 0) throw std::runtime_error("shared memory: pthread_atfork");
  layers_.push_back(std::make_unique<Layer>(segment, may_take_notes));
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().views.insert(this);
}

Views::~Views() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().views.erase(this);
}

char* Views::take(int64_t offset, int64_t bytes) {
  bytes = round_up(bytes, kPage);
  const std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = std::find_if(layers_.begin(), layers_.end(), [&](const auto& layer) {
    return !overlap(layer->taken, offset, bytes);
  });
  Layer* layer = nullptr;
  const bool is_new = found == layers_.end();
  if (!is_new) {
    layer = found->get();
  } else {
    try {
      layers_.push_back(std::make_unique<Layer>(address_, may_take_notes_));
    } catch (const std::runtime_error&) {
      return nullptr;
    }
    layer = layers_.back().get();
  }
  char* data = layer->mapping.data() + offset;
  int64_t& begun = layer->clean[offset];  // none at first
  // mlockall makes all pages of private mappings copies, as they are at that time.
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

bool Views::is_written(const char* view) const {
  const Found found = find(view);
  return found.layer->writes.any(view, found.bytes);
}

void Views::give_back(char* view) {
  if (getpid() != pid_) return;
  const Found found = find(view);
  // Not locked: its pages are still this view's alone.
  const bool written = found.layer->writes.any(view, found.bytes);
  if (written && !WrittenPages::drop(view, found.bytes)) return;  // never used again
  const std::lock_guard<std::mutex> lock(registry().mutex);
  Stretches& clean = found.layer->clean;
  for (auto each = clean.begin(); written && each != clean.end();) {
    const bool is_met = overlap({*each}, found.offset, found.bytes);
    each = is_met ? clean.erase(each) : std::next(each);
  }
  found.layer->taken.erase(found.offset);
}

Views::Found Views::find(const char* view) const {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  for (const auto& layer : layers_) {
    const int64_t offset = view - layer->mapping.data();
    if (offset >= 0 && offset < address_.bytes) {
      return {layer.get(), offset, layer->taken.at(offset)};
    }
  }
  throw std::logic_error("Views: not one of them");
}

void Views::before_fork() {
  registry().mutex.lock();
  bool copies = false;
  for (const Views* each : registry().views) {
    for (const auto& layer : each->layers_) copies = copies || !layer->taken.empty();
  }
  registry().gate.before(copies);
}

void Views::after_fork_in_parent() {
  registry().gate.in_parent();
  registry().mutex.unlock();
}

void Views::after_fork_in_child() noexcept {
  for (Views* each : registry().views) each->detach();
  registry().views.clear();
  registry().gate.in_child();
  registry().mutex.unlock();
}

// The child keeps what its tensors hold, in memory of its own: parent and peers write on.
void Views::detach() noexcept {
  for (const auto& layer : layers_) {
    layer->mapping.detach([&](char* copy) {
      for (const auto& [offset, bytes] : layer->taken) {
        std::memcpy(copy + offset, layer->mapping.data() + offset, bytes);
      }
    });
  }
}

}  // namespace flex_model
