#include "owned.h"

#include <algorithm>
#include <new>

#include "arena.h"

namespace flex_model {

Owned lease(int64_t bytes) {
  Arena& arena = Arena::of_process();
  char* data = arena.lease(bytes);
  if (data == nullptr) return {nullptr, nullptr};
  return {data, {data, [&arena](char* leased) { arena.end_lease(leased); }}};
}

Owned own_memory(int64_t bytes) {
  Owned leased = lease(bytes);
  if (leased.data != nullptr) return leased;
  constexpr auto kAlignment = std::align_val_t(64);  // as torch's own: results may depend on it
  void* data = ::operator new(std::max<int64_t>(1, bytes), kAlignment);
  return {static_cast<char*>(data), {data, [](void* at) { ::operator delete(at, kAlignment); }}};
}

}  // namespace flex_model
