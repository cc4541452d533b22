// The machine's memory and processors, as far as this process may use them.
#pragma once

#include <cstdint>
#include <string>

namespace flex_model {

// The kernel's page size: 4, 16 or 64 KiB.
int64_t page_bytes();

constexpr int64_t round_up(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

int64_t machine_bytes();  // of memory

// The memory that can be allocated without swapping, within the limits of this process's control
// group and of those that contain it. `root`: of the files that say so.
int64_t free_machine_bytes(const std::string& root = "");

int num_processors();  // that this process may run on

}  // namespace flex_model
