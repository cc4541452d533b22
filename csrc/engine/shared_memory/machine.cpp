#include "machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

namespace flex_model {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// Where the kernel shows the memory of control groups.
struct Hierarchy {
  const char* at;
  const char *limit, *usage;
  const char* of_files[2];  // in memory.stat: pages that are freed when others need memory
};
constexpr Hierarchy kVersion2{
    "/sys/fs/cgroup", "/memory.max", "/memory.current", {"active_file", "inactive_file"}};
constexpr Hierarchy kVersion1{"/sys/fs/cgroup/memory",
                              "/memory.limit_in_bytes",
                              "/memory.usage_in_bytes",
                              {"total_active_file", "total_inactive_file"}};

// Calls `use(name, number)` for each line of a file such as memory.stat or meminfo.
template <typename Use>
void for_each_number(const std::string& path, const Use& use) {
  std::ifstream file(path);
  std::string name, rest;
  for (int64_t value; file >> name >> value && std::getline(file, rest);) use(name, value);
}

// Reads the only number of a file; `otherwise` if it is "max" or missing.
int64_t read_number(const std::string& path, int64_t otherwise) {
  std::ifstream file(path);
  int64_t value;
  return file >> value ? value : otherwise;
}

// The memory that a control group may still allocate.
int64_t free_bytes_of(const std::string& group, const Hierarchy& files) {
  const int64_t limit = read_number(group + files.limit, kNoLimit);
  if (limit == kNoLimit) return limit;
  int64_t used = read_number(group + files.usage, 0);
  for_each_number(group + "/memory.stat", [&](const std::string& name, int64_t bytes) {
    if (name == files.of_files[0] || name == files.of_files[1]) used -= bytes;
  });
  return limit - std::max<int64_t>(used, 0);
}

// The least of a control group and those that contain it. A batch system limits a job by a group
// far up, and in a container the path may lead nowhere: then its own group is at the top.
int64_t free_bytes_from(const std::string& root, std::string path, const Hierarchy& files) {
  int64_t bytes = kNoLimit;
  for (size_t end = path.size(); end != std::string::npos; end = path.rfind('/')) {
    path.resize(end);
    bytes = std::min(bytes, free_bytes_of(root + files.at + path, files));
  }
  return bytes;
}

int64_t free_control_group_bytes(const std::string& root) {
  int64_t bytes = kNoLimit;
  std::ifstream file(root + "/proc/self/cgroup");
  // A line of each hierarchy: number:controllers:path. Version 2 has no controllers there.
  for (std::string number, controllers, path; std::getline(file, number, ':') &&
                                              std::getline(file, controllers, ':') &&
                                              std::getline(file, path);) {
    if (controllers.empty()) {
      bytes = std::min(bytes, free_bytes_from(root, path, kVersion2));
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      bytes = std::min(bytes, free_bytes_from(root, path, kVersion1));
    }
  }
  return bytes;
}

}  // namespace

int64_t page_bytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

int64_t machine_bytes() {
  static const int64_t bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes();
  return bytes;
}

int64_t free_machine_bytes(const std::string& root) {
  int64_t bytes = machine_bytes();
  for_each_number(root + "/proc/meminfo", [&](const std::string& name, int64_t kib) {
    if (name == "MemAvailable:") bytes = kib * 1024;
  });
  return std::min(bytes, free_control_group_bytes(root));
}

int num_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

uint64_t process_start(int32_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  // After the name, which may contain anything: the state, which is field 3, then numbers.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(line.substr(name_end + 1));
  char state = 0;
  fields >> state;
  int64_t value = 0, num_threads = 0;
  for (int field = 4; field <= 22 && fields >> value; ++field) {
    if (field == 20) num_threads = value;
  }
  // The first thread may have ended before others of its process.
  const bool has_ended = (state == 'Z' || state == 'X') && num_threads <= 1;
  return !fields || has_ended ? 0 : static_cast<uint64_t>(value);
}

}  // namespace flex_model
