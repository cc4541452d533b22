#include "views.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <stdexcept>

#include "fork_gate.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace flex_model {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kStretchBytes = 1 << 20;

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

// Whether a page of a private mapping was written to, or that can't be known.
// Source: Documentation/admin-guide/mm/pagemap.rst of the Linux kernel. Bit 63: the page is there;
// 62: it is swapped out; 61: it is a file's page, not one that a write has made.
bool is_written(const char* data, int64_t bytes) {
  const int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (file < 0) return true;
  uint64_t entries[1024];
  const auto first = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) / kPage);
  const int64_t pages = bytes / kPage;
  bool written = false;
  for (int64_t at = 0; at < pages && !written; at += 1024) {
    const auto size = static_cast<ssize_t>(std::min<int64_t>(1024, pages - at) * 8);
    if (pread(file, entries, size, (first + at) * 8) != size) written = true;
    for (ssize_t i = 0; i < size / 8 && !written; ++i) {
      const bool is_there = entries[i] >> 63 & 1, is_swapped = entries[i] >> 62 & 1;
      const bool is_of_file = entries[i] >> 61 & 1;
      written = is_swapped || (is_there && !is_of_file);
    }
  }
  close(file);
  return written;
}

bool try_out() {
  if (sysconf(_SC_PAGESIZE) != kPage) return false;
  try {
    const Segment segment = Segment::create(2 * kPage);
    Views views(segment.address());
    segment.data()[kPage] = 1;
    char* view = views.take(0, 2 * kPage);
    if (view == nullptr || view[kPage] != 1 || is_written(view, 2 * kPage)) return false;
    segment.data()[kPage] = 2;
    if (view[kPage] != 2) return false;
    view[kPage] = 3;
    if (segment.data()[kPage] != 2 || !is_written(view, 2 * kPage)) return false;
    views.give_back(view);
    return views.take(0, 2 * kPage) == view && view[kPage] == 2;
  } catch (const std::runtime_error&) {
    return false;
  }
}

}  // namespace

bool Views::work() {
  static const bool they_do = try_out();
  return they_do;
}

Views::Views(const SegmentAddress& segment) : address_(segment), pid_(getpid()) {
  static const int failed =
      pthread_atfork(&before_fork, &after_fork_in_parent, [] { after_fork_in_child(); });
  if (failed != 0) throw std::runtime_error("shared memory: pthread_atfork");
  layers_.push_back(std::make_unique<Layer>());
  layers_[0]->mapping = Segment::open_private(segment);
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().views.insert(this);
}

Views::~Views() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().views.erase(this);
}

char* Views::take(int64_t offset, int64_t bytes) {
  bytes = (bytes + kPage - 1) / kPage * kPage;
  const std::lock_guard<std::mutex> lock(registry().mutex);
  Layer* free = nullptr;
  for (const auto& layer : layers_) {
    const auto next = layer->taken.lower_bound(offset);
    const bool meets_next = next != layer->taken.end() && next->first < offset + bytes;
    const bool meets_last =
        next != layer->taken.begin() && std::prev(next)->first + std::prev(next)->second > offset;
    if (!meets_next && !meets_last) {
      free = layer.get();
      break;
    }
  }
  if (free == nullptr) {
    auto layer = std::make_unique<Layer>();
    try {
      layer->mapping = Segment::open_private(address_);
    } catch (const std::runtime_error&) {
      return nullptr;
    }
    layers_.push_back(std::move(layer));
    free = layers_.back().get();
  }
  free->taken[offset] = bytes;
  // The faults of pages that are there already, many at once.
  free->is_mapped.resize((address_.bytes + kStretchBytes - 1) / kStretchBytes);
  for (int64_t i = offset / kStretchBytes; i * kStretchBytes < offset + bytes; ++i) {
    if (free->is_mapped[i]) continue;
    const int64_t size = std::min(kStretchBytes, address_.bytes - i * kStretchBytes);
    madvise(free->mapping.data() + i * kStretchBytes, size, MADV_POPULATE_READ);
    free->is_mapped[i] = true;
  }
  return free->mapping.data() + offset;
}

void Views::give_back(char* data) {
  if (getpid() != pid_) return;
  Layer* layer = nullptr;
  int64_t offset = 0, bytes = 0;
  {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    for (size_t i = 0; layer == nullptr; ++i) {
      offset = data - layers_.at(i)->mapping.data();
      if (offset >= 0 && offset < address_.bytes) layer = layers_[i].get();
    }
    bytes = layer->taken.at(offset);
  }
  // Not locked: its pages are still this view's alone.
  const bool written = is_written(data, bytes);
  if (written && madvise(data, bytes, MADV_DONTNEED) != 0) return;  // never used again
  const std::lock_guard<std::mutex> lock(registry().mutex);
  for (int64_t i = offset / kStretchBytes; written && i * kStretchBytes < offset + bytes; ++i) {
    layer->is_mapped[i] = false;
  }
  layer->taken.erase(offset);
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
