// Copy-on-write views of one segment: tensors of several processes that share memory.
//
// A view is a range of a private mapping of the segment. It shows the segment's contents until this
// process writes to a page through the view: then the kernel copies that page for this process
// alone. So a full tensor that all ranks receive is written once and uses the memory of one, and
// still behaves as each rank's own. The first write to a page costs a page fault, several times as
// much as a copy in advance: views are for tensors that are expected to be read only.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "segment.h"
#include "written_pages.h"

namespace flex_model {

class CowMapping {
 public:
  // The size in bytes above which views cost less than copies; -1 where the kernel has none. Tested
  // once per process.
  static int64_t worthwhile_bytes();

  // Whether the kernel tracks writes to views (see WrittenPages); tested once per process.
  static bool tracks_writes();
  static void disable_tracking(bool without);

  // Maps one segment. std::runtime_error if it can't be opened.
  explicit CowMapping(const SegmentAddress& segment, bool may_track = tracks_writes());
  CowMapping(const CowMapping&) = delete;
  CowMapping& operator=(const CowMapping&) = delete;
  ~CowMapping();

  // Returns a view of `bytes` bytes at `offset` of the segment, a multiple of the page size. No
  // other tensor may use its pages until give_back(). Null if no further mapping can be made.
  char* take(int64_t offset, int64_t bytes);

  bool is_written(const char* view) const;

  // Ends a view and discards what was written to it. In a forked child, the view stays as it is.
  void give_back(char* view);

 private:
  using RangeMap = std::map<int64_t, int64_t>;  // bytes by offset

  // One private mapping of the whole segment. Views that overlap are in different ones.
  struct Layer {
    Layer(const SegmentAddress& segment, bool may_track);

    Segment mapping;
    WrittenPages writes;
    RangeMap taken;
    RangeMap clean;  // tracked (see WrittenPages::begin) and not written to since: may overlap
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
  const bool may_track_;
  const int32_t pid_;
  std::vector<std::unique_ptr<Layer>> layers_;
};

}  // namespace flex_model
