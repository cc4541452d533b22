// Memory that processes of one user on this host can share.
//
// It is an anonymous file (memfd): it has no name that could be left behind, is not limited by the
// size of /dev/shm, and is freed with the last process that maps it. Other processes open it
// through /proc/<pid>/fd, which the kernel grants to processes of the same user only. That needs no
// connection, so memory can be added at any time.
#pragma once

#include <cstdint>
#include <string>

#include "descriptor.h"

namespace flex_model {

// The data by which another process opens a segment.
struct SegmentAddress {
  int32_t pid;
  int32_t fd;
  uint64_t token;  // random, also at the segment's start: detects a reused pid or fd
  int64_t bytes;
};

// A range of memory of this process.
struct MemoryRange {
  char* data = nullptr;
  int64_t bytes = 0;
};

class Segment {
 public:
  // Allocates zeroed memory with all pages faulted in. std::runtime_error if there is none.
  static Segment create(int64_t bytes);

  // Maps the memory of another process. std::runtime_error with the reason if it can't.
  static Segment open(const SegmentAddress& address);

  // As open(), by a private mapping: no other process sees what is written to it.
  static Segment open_private(const SegmentAddress& address);

  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  char* data() const { return data_; }
  int64_t bytes() const { return address_.bytes; }
  MemoryRange range() const { return {data_, address_.bytes}; }
  const SegmentAddress& address() const { return address_; }

  // Excludes the mapping from forked children.
  void keep_from_children();

  // For a forked child: replaces the pages by private memory, into which `keep(copy)` copies what
  // is still needed.
  template <typename Keep>
  void detach(const Keep& keep) noexcept;

 private:
  static Segment open_as(const SegmentAddress& address, bool is_private);
  char* begin_detach() const noexcept;
  void end_detach(char* copy) noexcept;

  char* data_ = nullptr;  // page-aligned; the token's page lies before it
  SegmentAddress address_{-1, -1, 0, 0};
  Descriptor file_;       // where this process created the segment: peers open it by its number
  int32_t kept_by_ = -1;  // the only process that has the mapping, if children don't
};

template <typename Keep>
void Segment::detach(const Keep& keep) noexcept {
  char* copy = begin_detach();
  if (copy != nullptr) keep(copy);
  end_detach(copy);
}

}  // namespace flex_model
