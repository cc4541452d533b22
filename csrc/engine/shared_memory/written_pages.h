// Detects which pages of a private mapping this process has written to, so that they no longer show
// the file.
#pragma once

#include <cstdint>

namespace flex_model {

class WrittenPages {
 public:
  // Covers the whole mapping at `data`. The kernel tracks writes where it can (userfaultfd's
  // asynchronous write protection: Linux 6.7); otherwise the page table is read.
  WrittenPages(char* data, int64_t bytes, bool may_track = true);

  // Resets a range before use: its pages show the file, are faulted in, and none counts as written.
  // False if some may not show the file.
  bool begin(char* data, int64_t bytes) const;

  // Whether the range was written to since begin(), or may have been.
  bool any(const char* data, int64_t bytes) const;

  // Discards the pages that were written to, so that the file's show again. False if that failed.
  static bool drop(char* data, int64_t bytes);

 private:
  bool tracks_writes_ = false;
};

}  // namespace flex_model
