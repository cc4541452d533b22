// Memory that is freed when its last user dies.
#pragma once

#include <cstdint>
#include <memory>

namespace flex_model {

// Memory of a tensor; `keeper` frees it when destroyed.
struct Owned {
  char* data;
  std::shared_ptr<void> keeper;
};

// Leases memory of the arena; `data` is null if the arena is full.
Owned lease(int64_t bytes);

// Allocates memory, in the arena if it has room.
Owned own_memory(int64_t bytes);

}  // namespace flex_model
