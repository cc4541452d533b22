// The machine's memory and processors, as far as this process may use them.
#pragma once

#include <cstdint>

namespace flex_model {

constexpr int64_t kPage = 4096;  // where pages have another size, there are no views

constexpr int64_t round_up(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

int64_t machine_bytes();       // of memory
int64_t free_machine_bytes();  // that can be allocated without swapping, within the limits of this
                               // process's control group
int num_processors();          // that this process may run on

}  // namespace flex_model
