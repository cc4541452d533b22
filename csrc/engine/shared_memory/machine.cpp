#include "machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace flex_model {
namespace {

// Reads a number of the control group; the largest int64 if it is "max" or missing.
int64_t control_group_number(const char* name) {
  std::ifstream file(std::string("/sys/fs/cgroup/") + name);
  int64_t value;
  return file >> value ? value : std::numeric_limits<int64_t>::max();
}

}  // namespace

int64_t machine_bytes() {
  static const int64_t bytes =
      static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  return bytes;
}

int64_t free_machine_bytes() {
  int64_t bytes = machine_bytes();
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  for (int64_t value; file >> name >> value && std::getline(file, unit);) {
    if (name == "MemAvailable:") {
      bytes = value * 1024;
      break;
    }
  }
  const int64_t most = control_group_number("memory.max");
  if (most != std::numeric_limits<int64_t>::max()) {
    bytes = std::min(bytes, most - control_group_number("memory.current"));
  }
  return bytes;
}

int num_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

}  // namespace flex_model
