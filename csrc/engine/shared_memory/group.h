// Ranks of one host, and the rounds in which they talk to each other.
//
// In a round every rank posts one message of at most kMessageBytes and reads those of the others,
// of all or of some. A rank may post its next one as soon as all have posted this one: messages are
// kept twice, so nobody writes where another still reads, and no barrier ends a round.
//
// Methods are for one thread at a time. What a wait throws leaves the group unusable.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "arena.h"
#include "flag.h"
#include "segment.h"
#include "views.h"

namespace flex_model {

constexpr int64_t kMessageBytes = 64 << 10;

// Why a wait ended without what it waited for.
struct WaitError : std::exception {
  enum Reason { kLate, kDead, kBroken, kOutOfStep };
  Reason reason;
  std::vector<int64_t> ranks;  // of the group: who is late or dead
  std::string text;            // kBroken: what the rank that gave up said; kOutOfStep: what differs

  WaitError(Reason reason, std::vector<int64_t> ranks, std::string text)
      : reason(reason), ranks(std::move(ranks)), text(std::move(text)) {}
  const char* what() const noexcept override { return text.c_str(); }
};

// What a rank does in a round: ranks that do different things are told so.
enum class Act : uint32_t { kExchange = 1, kAllGather, kGather, kFromFirst, kDone, kStream };

class Group {
 public:
  struct Rank {
    int32_t pid;
    SegmentAddress arena_table;
  };

  // The control block that all ranks of a group share; made by one of them.
  static Segment make_control(int64_t num_ranks);

  // `control` is the block, own or opened; `ranks` in their order, `rank` this process's place.
  // Ranks may be threads of one process: their control block is one. std::runtime_error if a rank's
  // memory can't be reached.
  Group(std::shared_ptr<Segment> control, std::vector<Rank> ranks, int64_t rank);
  ~Group();

  int64_t rank() const { return rank_; }
  int64_t size() const { return static_cast<int64_t>(ranks_.size()); }

  // How long a wait may take, in seconds; where this rank is, told to others that wait for it; what
  // else to do every 20 ms of a long wait, given how long it has lasted (see signals, say).
  void set_timeout(double seconds) { timeout_s_ = seconds; }
  void set_position(std::string text) { position_ = std::move(text); }
  void set_watch(std::function<void(double)> watch) { watch_ = std::move(watch); }

  // A notice of this rank's, and what stands on another's: to be read without an exchange.
  void publish(const std::string& notice);
  std::string published(int64_t rank) const;

  // Where a rank was when it last had to wait for long, and whether it is further on than this one.
  std::string position_of(int64_t rank) const;
  bool is_behind(int64_t rank) const;

  // Tells all ranks that this group can't be used any more; the first reason stands.
  void give_up(const std::string& reason);
  bool is_broken() const;

  // A round. begin: where to write this rank's message. post: it can be read. message: of another
  // rank, or one's own, once it has posted; `act` and `detail` must be the same there.
  char* begin();
  void post(Act act, uint64_t detail = 0);
  const char* message(int64_t rank);

  // WaitError if a rank has given up: what was read from it meanwhile may be of other tensors.
  void check_unbroken();

  // The memory of another rank's arena, and the segment that it is in, as mapped here.
  char* peer(int64_t rank, const Place& place, int64_t bytes, Stretch* stretch = nullptr);

  // One reader of a rank's shared lease, who leaves when this is destroyed; in a forked child, the
  // parent's stays.
  class Reader {
   public:
    Reader(ArenaTable* table, std::shared_ptr<Segment> memory, int64_t number);
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;
    ~Reader();

   private:
    ArenaTable* table_;
    std::shared_ptr<Segment> memory_;
    int64_t number_;
    int32_t pid_;
  };
  std::unique_ptr<Reader> reader(int64_t rank, int64_t number);

  // Of the segment of a rank's arena that a place is in. std::runtime_error if it can't be reached.
  std::shared_ptr<Views> views(int64_t rank, const Place& place);

 private:
  struct Control;
  struct Message;
  struct Peer {
    std::shared_ptr<Segment> table;  // null for ranks of this process
    std::vector<Segment> segments;
    std::map<int64_t, std::shared_ptr<Views>> views;  // by segment
  };

  ArenaTable& table_of(int64_t rank) const;
  Control& control() const;
  Message& message_at(int64_t rank, uint32_t round) const;
  void wait(int64_t rank, uint32_t round);
  void look_around(int64_t rank, uint32_t round);
  void check_usable() const;
  void start_giving_up();
  [[noreturn]] void fail(WaitError::Reason reason, std::vector<int64_t> ranks, std::string text);

  std::shared_ptr<Segment> control_;
  std::vector<Rank> ranks_;
  int64_t rank_;
  int32_t pid_;
  std::vector<int> watches_;  // a pidfd of each rank, -1 where there is none
  std::vector<Peer> peers_;
  double timeout_s_ = 60;
  std::string position_;
  std::function<void(double)> watch_;
  Patience patience_;
  uint32_t round_ = 0;    // of the last post
  Act act_ = Act::kDone;  // of the last post
  uint64_t detail_ = 0;
  double waiting_since_ = 0;
  bool is_giving_up_ = false;  // the others know it, but not yet why
};

}  // namespace flex_model
