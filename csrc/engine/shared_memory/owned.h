// Memory that goes back where it came from when its last user dies.
#pragma once

#include <cstdint>
#include <memory>

namespace flex_model {

// Memory of a tensor, until its keeper dies.
struct Owned {
  char* data;
  std::shared_ptr<void> keeper;
};

// Of the arena; null data if it is full.
Owned lease(int64_t bytes);

// Of this process: out of its arena if there is room.
Owned own_memory(int64_t bytes);

}  // namespace flex_model
