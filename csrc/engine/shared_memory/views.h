// Tensors of several processes in one piece of memory.
//
// A view is a stretch of a segment as a private mapping shows it: it holds what the segment holds,
// and a page that somebody writes to through the view becomes, at that moment, a page of this
// process alone (copy on write, done by the kernel). So a full tensor that all ranks are to have is
// written once, takes the memory of one, and is each rank's own nevertheless. A first write costs a
// page fault for each page, several times what a copy in advance does: views are for what is
// expected to be read only.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "segment.h"

namespace flex_model {

class Views {
 public:
  // Whether they can be had on this machine: tried out once.
  static bool work();

  // Of one segment. std::runtime_error if it can't be reached.
  explicit Views(const SegmentAddress& segment);
  Views(const Views&) = delete;
  Views& operator=(const Views&) = delete;
  ~Views();

  // `bytes` bytes at `offset` of the segment, where a page begins; all pages that they are in must
  // be this tensor's alone until the view is given back. Null if the machine has no room for one
  // more mapping.
  char* take(int64_t offset, int64_t bytes);

  // Ends a view; what was written to it is gone. In a forked child, the view stays as it is.
  void give_back(char* data);

 private:
  // One private mapping of the whole segment. Views that overlap are in different ones.
  struct Layer {
    Segment mapping;
    std::map<int64_t, int64_t> taken;  // bytes by offset
    std::vector<bool> is_mapped;       // of each stretch of kStretchBytes: its pages are at hand
  };

  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child() noexcept;
  void detach() noexcept;

  const SegmentAddress address_;
  const int32_t pid_;
  std::vector<std::unique_ptr<Layer>> layers_;
};

}  // namespace flex_model
