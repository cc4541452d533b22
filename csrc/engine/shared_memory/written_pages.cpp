#include "written_pages.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>

#include "descriptor.h"
#include "machine.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24
#endif

namespace flex_model {
namespace {

// What headers of older kernels lack.
// Sources: Documentation/admin-guide/mm/userfaultfd.rst and pagemap.rst of the Linux kernel.
constexpr int kUserModeOnly = 1;
constexpr uint64_t kFlagsOfWrites = 1 << 0;    // UFFD_FEATURE_PAGEFAULT_FLAG_WP
constexpr uint64_t kSharedMemory = 1 << 12;    // UFFD_FEATURE_WP_HUGETLBFS_SHMEM
constexpr uint64_t kUnpopulated = 1 << 13;     // UFFD_FEATURE_WP_UNPOPULATED
constexpr uint64_t kLiftedByKernel = 1 << 15;  // UFFD_FEATURE_WP_ASYNC
struct ScanArguments {                         // pm_scan_arg
  uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
  uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
constexpr auto kScan = _IOWR('f', 16, ScanArguments);  // PAGEMAP_SCAN
constexpr uint64_t kWritten = 1 << 1;                  // PAGE_IS_WRITTEN
struct ScannedRange {                                  // page_region
  uint64_t start, end, categories;
};

uint64_t number(const char* data) { return reinterpret_cast<uintptr_t>(data); }

// The userfaultfd of this process; -1 if the kernel has none. Never closed: that ends the tracking.
int tracker() {
  static std::mutex mutex;
  static auto* const file = new Descriptor;
  static pid_t owner = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (owner == getpid()) return file->get();
  owner = getpid();
  *file = Descriptor(
      static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | kUserModeOnly)));
  uffdio_api api{};
  api.api = UFFD_API;
  api.features = kFlagsOfWrites | kSharedMemory | kUnpopulated | kLiftedByKernel;
  if (ioctl(file->get(), UFFDIO_API, &api) != 0) *file = Descriptor();
  return file->get();
}

// Whether a page is present, or swapped out, without the write protection that begin() set.
bool any_by_scan(int table, const char* data, int64_t bytes) {
  ScannedRange found;
  ScanArguments scan{};
  scan.size = sizeof(scan);
  scan.start = number(data);
  scan.end = number(data) + bytes;
  scan.vec = number(reinterpret_cast<char*>(&found));
  scan.vec_len = scan.max_pages = 1;
  scan.category_mask = scan.return_mask = kWritten;
  return ioctl(table, kScan, &scan) != 0;  // the number of ranges; an error counts as written
}

// Bit 63 of an entry: the page is present; 62: it is swapped out; 61: it is a file's page.
bool any_by_entries(int table, const char* data, int64_t bytes) {
  constexpr int64_t kAtOnce = 1024;
  uint64_t entries[kAtOnce];
  const int64_t pages = bytes / page_bytes();
  for (int64_t at = 0; at < pages; at += kAtOnce) {
    const int64_t count = std::min(kAtOnce, pages - at);
    const int64_t first = static_cast<int64_t>(number(data)) / page_bytes() + at;
    if (pread(table, entries, count * 8, first * 8) != count * 8) return true;
    for (int64_t i = 0; i < count; ++i) {
      const bool is_present = entries[i] >> 63 & 1, is_swapped = entries[i] >> 62 & 1;
      const bool is_of_file = entries[i] >> 61 & 1;
      if (is_swapped || (is_present && !is_of_file)) return true;
    }
  }
  return false;
}

}  // namespace

WrittenPages::WrittenPages(char* data, int64_t bytes, bool may_track) {
  if (!may_track || tracker() < 0) return;
  uffdio_register all{};
  all.range = {number(data), static_cast<uint64_t>(bytes)};
  all.mode = UFFDIO_REGISTER_MODE_WP;
  tracks_writes_ = ioctl(tracker(), UFFDIO_REGISTER, &all) == 0;
}

bool WrittenPages::drop(char* data, int64_t bytes) {
  return madvise(data, bytes, MADV_DONTNEED) == 0 ||
         madvise(data, bytes, MADV_DONTNEED_LOCKED) == 0;
}

bool WrittenPages::begin(char* data, int64_t bytes) const {
  if (!drop(data, bytes)) return false;      // the pages of a locked mapping are copies
  madvise(data, bytes, MADV_POPULATE_READ);  // the faults of many pages at once, if it is known
  if (!tracks_writes_) return true;
  uffdio_writeprotect protect{};
  protect.range = {number(data), static_cast<uint64_t>(bytes)};
  protect.mode = UFFDIO_WRITEPROTECT_MODE_WP;
  ioctl(tracker(), UFFDIO_WRITEPROTECT, &protect);  // if it fails, the pages count as written
  return true;
}

bool WrittenPages::any(const char* data, int64_t bytes) const {
  const int table = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (table < 0) return true;
  const bool found =
      tracks_writes_ ? any_by_scan(table, data, bytes) : any_by_entries(table, data, bytes);
  close(table);
  return found;
}

}  // namespace flex_model
