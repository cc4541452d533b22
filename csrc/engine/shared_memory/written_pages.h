// Which pages of a private mapping this process has written to, so that they are no longer the
// file's.
#pragma once

#include <cstdint>

namespace flex_model {

class WrittenPages {
 public:
  // Of the whole mapping at `data`. Where the kernel can, it takes notes of writes (userfaultfd's
  // write protection, which it lifts by itself: Linux 6.7); else its table of pages is read.
  WrittenPages(char* data, int64_t bytes, bool may_take_notes = true);

  // Before the stretch is used: its pages are the file's and at hand, and none of them counts as
  // written. False if some may not be the file's.
  bool begin(char* data, int64_t bytes) const;

  // Whether something was written to the stretch since then, or that can't be known.
  bool any(const char* data, int64_t bytes) const;

  // The file's pages again, in the place of those that were written to. False if that failed.
  static bool drop(char* data, int64_t bytes);

 private:
  bool takes_notes_ = false;
};

}  // namespace flex_model
