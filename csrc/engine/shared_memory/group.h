// The ranks of one host, and the rounds of messages by which they communicate.
//
// In a round every rank posts one message of at most kMessageBytes and reads the messages of some
// or all others. A rank may post the next one as soon as all have posted this one: messages are
// double buffered, so no rank writes where another still reads, and a round needs no barrier at its
// end.
//
// Methods are for one thread at a time. The group is unusable after a wait has thrown.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "arena.h"
#include "cow_mapping.h"
#include "flag.h"
#include "segment.h"

namespace flex_model {

constexpr int64_t kMessageBytes = 64 << 10;

// A failed wait for other ranks.
struct WaitError : std::exception {
  enum Reason { kLate, kDead, kBroken, kOutOfStep };
  Reason reason;
  std::vector<int64_t> ranks;  // of the group: those that are late or dead
  std::string text;  // kBroken: the reason of the rank that aborted; kOutOfStep: what differs

  WaitError(Reason reason, std::vector<int64_t> ranks, std::string text)
      : reason(reason), ranks(std::move(ranks)), text(std::move(text)) {}
  const char* what() const noexcept override { return text.c_str(); }
};

// The operation of a round, which every rank compares with its own.
enum class Op : uint32_t { kExchange = 1, kAllGather, kGather, kFromFirst, kDone, kStream };

class Group {
 public:
  struct Rank {
    int32_t pid;
    SegmentAddress arena_table;
  };

  // Makes the control block that all ranks of a group share; one rank calls it.
  static Segment make_control(int64_t num_ranks);

  // `control` is the block, made here or opened; `rank` is this process's index in `ranks`. Ranks
  // may be threads of one process, which share the control block. std::runtime_error if a rank's
  // memory can't be opened.
  Group(std::shared_ptr<Segment> control, std::vector<Rank> ranks, int64_t rank);

  int64_t rank() const { return rank_; }
  int64_t size() const { return static_cast<int64_t>(ranks_.size()); }

  // Of each rank: 1 if it has made its Group, -1 if it has refused the group of this number (see
  // ArenaTable), 0 if it is not known yet.
  std::vector<int> who_opened(uint64_t number) const;

  // Settings of waits: their deadline in seconds; this rank's position, which others report when
  // they wait for it; a callback that gets the seconds waited, every 20 ms of a long wait (to
  // handle signals, for example).
  void set_timeout(double seconds) { timeout_s_ = seconds; }
  void set_position(std::string text) { position_ = std::move(text); }
  void set_watch(std::function<void(double)> watch) { watch_ = std::move(watch); }

  // Writes this rank's notice, and reads another rank's, without an exchange; none while it is
  // being written.
  void publish(const std::string& notice);
  std::optional<std::string> published(int64_t rank) const;

  // A rank's position when it last had to wait for long, and whether it has posted fewer rounds
  // than this one.
  std::string position_of(int64_t rank) const;
  bool is_behind(int64_t rank) const;

  // Makes the group unusable on all ranks; the first reason is kept.
  void abort(const std::string& reason);
  bool is_broken() const;

  // A round. begin: returns the buffer for this rank's message. post: publishes it. message: waits
  // for a rank's message (this rank's own too), which must have the same `op` and `detail`.
  char* begin();
  void post(Op op, uint64_t detail = 0);
  const char* message(int64_t rank);

  // WaitError if a rank has aborted: its memory may have been reused while it was read.
  void check_unbroken();

  // The address here of memory in another rank's arena; `range` receives the segment it is in.
  char* peer(int64_t rank, const Place& place, int64_t bytes, MemoryRange* range = nullptr);

  // A reader of a rank's shared lease, released when it is destroyed; not in a forked child, where
  // the reader is the parent's.
  using Reader = std::shared_ptr<void>;
  Reader reader(int64_t rank, int64_t number);

  // The views of the segment of a rank's arena. std::runtime_error if it can't be opened.
  std::shared_ptr<CowMapping> views(int64_t rank, const Place& place);

 private:
  struct Control;
  struct Message;
  struct Peer {
    std::shared_ptr<Segment> table;  // null for ranks of this process
    std::vector<Segment> segments;
    std::map<int64_t, std::shared_ptr<CowMapping>> views;  // by segment
  };

  ArenaTable& table_of(int64_t rank) const;
  Control& control() const;
  Message& message_at(int64_t rank, uint32_t round) const;
  void wait(int64_t rank, uint32_t round);
  void on_poll(int64_t rank, uint32_t round);
  void check_usable() const;
  void begin_abort();
  [[noreturn]] void fail(WaitError::Reason reason, std::vector<int64_t> ranks, std::string text);

  std::shared_ptr<Segment> control_;
  std::vector<Rank> ranks_;
  int64_t rank_;
  int32_t pid_;
  std::vector<uint64_t> starts_;  // when each rank's process started
  std::vector<Peer> peers_;
  double timeout_s_ = 60;
  std::string position_;
  std::function<void(double)> watch_;
  Backoff backoff_;
  uint32_t round_ = 0;  // of the last post
  Op op_ = Op::kDone;   // of the last post
  uint64_t detail_ = 0;
  double waiting_since_ = 0;
  bool is_aborting_ = false;  // the others see the state, but not yet the reason
};

}  // namespace flex_model
