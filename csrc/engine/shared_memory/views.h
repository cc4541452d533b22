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
#include "written_pages.h"

namespace flex_model {

class Views {
 public:
  // From how many bytes on they cost less than copies; -1 where they can't be had. Tried out once.
  static int64_t worthwhile_bytes();

  // Whether the kernel takes notes of what is written to them (see WrittenPages): tried out once,
  // unless they are to do without.
  static bool take_notes();
  static void do_without_notes(bool without);

  // Of one segment. std::runtime_error if it can't be reached.
  explicit Views(const SegmentAddress& segment, bool may_take_notes = take_notes());
  Views(const Views&) = delete;
  Views& operator=(const Views&) = delete;
  ~Views();

  // `bytes` bytes at `offset` of the segment, where a page begins; all pages that they are in must
  // be this tensor's alone until the view is given back. Null if the machine has no room for one
  // more mapping.
  char* take(int64_t offset, int64_t bytes);

  bool is_written(const char* view) const;

  // Ends a view; what was written to it is gone. In a forked child, the view stays as it is.
  void give_back(char* view);

 private:
  using Stretches = std::map<int64_t, int64_t>;  // bytes by offset

  // One private mapping of the whole segment. Views that overlap are in different ones.
  struct Layer {
    Layer(const SegmentAddress& segment, bool may_take_notes);

    Segment mapping;
    WrittenPages writes;
    Stretches taken;
    Stretches clean;  // begun (see WrittenPages), and not written to since: may overlap
  };
  struct Found {
    Layer* layer;
    int64_t offset, bytes;
  };

  Found find(const char* view) const;
  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child() noexcept;
  void detach() noexcept;

  const SegmentAddress address_;
  const bool may_take_notes_;
  const int32_t pid_;
  std::vector<std::unique_ptr<Layer>> layers_;
};

}  // namespace flex_model
