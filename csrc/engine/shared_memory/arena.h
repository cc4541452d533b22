// A pool of memory for tensors that other processes of the host can read and write.
//
// Pages are faulted in once and reused: for tensors of many MiB the faults of fresh memory cost
// several times the copy. There is one arena per process. It grows by segments; a lease ends when
// the tensor made of it dies. Threads may lease and end leases at any time.
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

// An address in an arena that is valid in every process.
struct Place {
  int64_t segment = -1;  // -1: not in the arena
  int64_t offset = 0;
};

// A table in shared memory by which peers find the segments of an arena: entries are only added. It
// also counts the readers of each shared lease.
struct ArenaTable {
  static constexpr int64_t kMaxSegments = 1024;
  static constexpr int64_t kMaxShared = 16384;
  std::atomic<int64_t> num_segments;
  SegmentAddress segments[kMaxSegments];
  std::atomic<int64_t> num_unread;  // shared leases whose last reader was released, so far
  std::atomic<int32_t> readers[kMaxShared];
  // The control block that this process offers to the ranks of a new group, and the number of that
  // group, which is written last; and the number of a group that this process can't take part in.
  SegmentAddress control;
  std::atomic<uint64_t> offered;
  std::atomic<uint64_t> refused;

  // Releases one reader of a shared lease, which no longer reads its memory.
  void release_reader(int64_t shared);
};

class Arena {
 public:
  // The arena of this process; in a forked child it has no peers.
  static Arena& of_process();

  // Leases at least `bytes` bytes; null if there are no peers, or if the limit or the machine's
  // memory is exhausted.
  char* lease(int64_t bytes);

  // Ends the lease of `data`.
  void end_lease(char* data);

  // A lease of whole pages that ends with its last reader, in this process or another. It starts
  // with one reader, which is released through the table. `data` is null if nothing can be leased.
  struct Shared {
    char* data = nullptr;
    int64_t number = -1;  // in the table
  };
  Shared lease_shared(int64_t bytes);

  // Marks leased memory that a late peer may still write to: it is never leased again, unless it
  // is reinstated before its lease ends.
  void retire(char* data) { set_retired(data, true); }
  void reinstate(char* data) { set_retired(data, false); }

  // Frees all segments without leases now, and the others as their leases end. For when there are
  // no peers any more: nothing is leased until table() is called again.
  void close();

  // The inverse of place_of.
  char* at(const Place& place) const;

  // The place of `bytes` bytes at `data`.
  Place place_of(const char* data, int64_t bytes) const;

  // The segment that contains `data`, as mapped here; null if `data` is not in the arena.
  MemoryRange segment_of(const char* data) const;

  // The address of the ArenaTable, to be sent to peers: from now on memory can be leased.
  SegmentAddress table();

  // The table itself; table() must have been called.
  ArenaTable& own_table() { return *reinterpret_cast<ArenaTable*>(table_.data()); }

  // Sets how many bytes the arena may hold; -1 for as many as the machine has.
  void set_limit(int64_t bytes);

  int64_t held_bytes() const;  // allocated from the machine
  int64_t leased_bytes();      // in use by leases

  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child() noexcept;

 private:
  struct Part {  // a range of a segment
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
  std::vector<std::unique_ptr<Held>> held_;  // null: freed
  std::set<FreePart> free_;                  // by size: the smallest that fits is used
  Segment table_;
  // Shared leases by their number in the table; null: the segment is freed, the number still used.
  std::map<int64_t, char*> shared_;
  int64_t num_unread_ = 0;  // the table's count when it was last read
  bool is_forked_ = false;
  ForkGate gate_;
  int64_t held_bytes_ = 0, leased_bytes_ = 0, limit_ = -1;
  bool has_peers_ = false;
};

}  // namespace flex_model
