// A piece of memory that processes of the same user on this host can share.
//
// An anonymous file (memfd): it has no name that could be left behind, is not limited by the size
// of /dev/shm, and is gone with the last process that maps it. Others reach it through
// /proc/<pid>/fd, which the kernel grants to processes of the same user only, and which needs no
// connection, so memory can be added at any time.
#pragma once

#include <cstdint>
#include <string>

namespace flex_model {

// How another process finds a segment.
struct SegmentAddress {
  int32_t pid;
  int32_t fd;
  uint64_t token;  // random, at the segment's start: a number that was used again is noticed
  int64_t bytes;
};

// Memory of this process.
struct Stretch {
  char* data = nullptr;
  int64_t bytes = 0;
};

class Segment {
 public:
  // New zeroed memory of this process, with all pages at hand. std::runtime_error if there is none.
  static Segment create(int64_t bytes);

  // The memory of another process. std::runtime_error with the reason if it can't be reached.
  static Segment open(const SegmentAddress& address);

  // The same as a private mapping: what is written to it, nobody else sees.
  static Segment open_private(const SegmentAddress& address);

  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  char* data() const { return data_; }
  int64_t bytes() const { return address_.bytes; }
  Stretch stretch() const { return {data_, address_.bytes}; }
  const SegmentAddress& address() const { return address_; }

  // Forked children don't have it.
  void keep_from_children();

  // In a forked child: the pages become memory of its own, of which `keep(copy_to)` may fill what
  // is still needed.
  template <typename Keep>
  void detach(const Keep& keep) noexcept;

 private:
  static Segment open_as(const SegmentAddress& address, bool is_private);
  char* begin_detach() const noexcept;
  void end_detach(char* copy) noexcept;

  char* data_ = nullptr;  // page-aligned; the token's page lies before it
  SegmentAddress address_{-1, -1, 0, 0};
  int32_t kept_by_ = -1;  // the only process that has it, if it is kept from children
};

template <typename Keep>
void Segment::detach(const Keep& keep) noexcept {
  char* copy = begin_detach();
  if (copy != nullptr) keep(copy);
  end_detach(copy);
}

}  // namespace flex_model
