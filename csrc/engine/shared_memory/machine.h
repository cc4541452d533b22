// The machine's memory and processors, as far as this process may use them, and its processes.
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

// When a process started, in ticks of the kernel; 0 if there is none, or it has ended. With its
// number it identifies a process: the number may be given to another one.
uint64_t process_start(int32_t pid);

}  // namespace flex_model
