// The pool of memory from which this process gives out tensors that its peers can write and read.
//
// Pages are faulted in once and used again: for tensors of many MiB the faults of fresh memory cost
// several times the copy. One arena a process, which grows by segments; a lease ends with the
// tensor that was made of it. Threads may lease and end leases at any time.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "fork_gate.h"
#include "segment.h"

namespace flex_model {

// A stretch of an arena as peers name it.
struct Place {
  int64_t segment = -1;  // -1: not in the arena
  int64_t offset = 0;
};

// The segments of an arena, for peers to read: a table in memory of its own, only ever added to.
// And how many readers each shared lease has, who say there when they leave.
struct ArenaTable {
  static constexpr int64_t kMaxSegments = 1024;
  static constexpr int64_t kMaxShared = 16384;
  std::atomic<int64_t> num_segments;
  SegmentAddress segments[kMaxSegments];
  std::atomic<int64_t> num_unread;  // shared leases that have lost their last reader, so far
  std::atomic<int32_t> readers[kMaxShared];

  // A reader of that shared lease leaves: from now on its memory is not read.
  void leave(int64_t shared);
};

class Arena {
 public:
  // This process's; in a forked child, one that has no peers.
  static Arena& of_process();

  // Bytes of at least this number; null if there are no peers, or the limit or the machine's
  // memory is reached.
  char* lease(int64_t bytes);

  // `data` was leased, and is free again.
  void end_lease(char* data);

  // A lease in whole pages that ends when nobody reads it any more, here or in other processes. It
  // has one reader, who leaves by the table. A null `data` if there is none.
  struct Shared {
    char* data = nullptr;
    int64_t number = -1;  // in the table
  };
  Shared lease_shared(int64_t bytes);

  // `data` was leased, and a peer that is late may still write to it: it is never given out again,
  // unless it is reinstated before its lease ends.
  void retire(char* data) { set_retired(data, true); }
  void reinstate(char* data) { set_retired(data, false); }

  // There are no peers any more: gives back what is not leased, and the rest as its leases end.
  // Until the table is asked for again, nothing is given out.
  void close();

  // The inverse of place_of.
  char* at(const Place& place) const;

  // Where `bytes` bytes at `data` lie.
  Place place_of(const char* data, int64_t bytes) const;

  // The segment that `data` is in, as mapped here; null if it is not in the arena.
  Stretch segment_of(const char* data) const;

  // Of the table (an ArenaTable), for peers: from now on there are some.
  SegmentAddress table();

  // The same, of a process that has asked for it.
  ArenaTable& own_table() { return *reinterpret_cast<ArenaTable*>(table_.data()); }

  // The most bytes that it may hold; -1 for as much as the machine can give.
  void set_limit(int64_t bytes);

  int64_t held_bytes() const;  // taken from the machine
  int64_t leased_bytes();      // given out

  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child() noexcept;

 private:
  struct Part {  // of a segment
    int64_t bytes;
    bool is_free;
    bool is_retired = false;
    bool is_shared = false;
  };
  struct Held {
    Segment segment;
    std::map<int64_t, Part> parts;  // by offset; they tile the segment
  };
  struct FreePart {
    int64_t bytes;
    int64_t segment;
    int64_t offset;
    bool operator<(const FreePart& other) const {
      return std::tie(bytes, segment, offset) < std::tie(other.bytes, other.segment, other.offset);
    }
  };

  void set_retired(char* data, bool is_retired);
  char* take(int64_t bytes, int64_t alignment, bool is_shared);
  void end(char* data);
  void end_unread();
  bool grow(int64_t bytes);
  void detach() noexcept;
  void give_back_if_free(size_t index);
  Held* find(const char* data, int64_t* index) const;

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Held>> held_;  // null: given back
  std::set<FreePart> free_;                  // the smallest that fits is taken
  Segment table_;
  // Leases by their number in the table; null: its segment was given back, the number not yet.
  std::map<int64_t, char*> shared_;
  int64_t num_unread_ = 0;  // of which was heard
  bool is_forked_ = false;
  ForkGate gate_;
  int64_t held_bytes_ = 0, leased_bytes_ = 0, limit_ = -1;
  bool has_peers_ = false;
};

}  // namespace flex_model
