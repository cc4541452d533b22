#include "group.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>

#include "machine.h"
#include "shared_text.h"

namespace flex_model {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

struct Group::Message {
  // The header of a round; the headers of hooks are in the bytes, which begin with a cache line.
  uint32_t round;
  Op op;
  uint64_t detail;
  char padding[48];
  char bytes[kMessageBytes];
};

struct Group::Control {
  struct Rank {
    Flag posted;
    std::atomic<uint32_t> is_open;  // it has made its Group
    SharedText position;
    SharedText notice;
  };
  std::atomic<uint32_t> state;  // 0: usable, 1: the reason is being written, 2: broken
  SharedText reason;
  Rank ranks[1];  // one per rank, followed by two messages per rank

  // A multiple of a cache line, because a Flag is.
  static int64_t bytes_before_messages(int64_t num_ranks) {
    return sizeof(Control) + (num_ranks - 1) * sizeof(Rank);
  }
};

Segment Group::make_control(int64_t num_ranks) {
  Segment segment =
      Segment::create(Control::bytes_before_messages(num_ranks) + 2 * num_ranks * sizeof(Message));
  segment.keep_from_children();
  return segment;
}

Group::Group(std::shared_ptr<Segment> control, std::vector<Rank> ranks, int64_t rank)
    : control_(std::move(control)), ranks_(std::move(ranks)), rank_(rank), pid_(getpid()) {
  static_assert(std::atomic<uint32_t>::is_always_lock_free, "flags are shared by processes");
  peers_.resize(ranks_.size());
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (ranks_[r].pid == pid_) continue;
    peers_[r].table = std::make_shared<Segment>(Segment::open(ranks_[r].arena_table));
  }
  for (const Rank& other : ranks_) starts_.push_back(process_start(other.pid));
  // More ranks than processors: a rank that spins keeps the one that it waits for from running.
  backoff_.spins = size() <= num_processors();
  this->control().ranks[rank_].is_open.store(1, std::memory_order_release);
}

std::vector<int> Group::who_opened(uint64_t number) const {
  std::vector<int> result;
  for (int64_t r = 0; r < size(); ++r) {
    const bool is_open = control().ranks[r].is_open.load(std::memory_order_acquire) != 0;
    const bool has_refused = table_of(r).refused.load(std::memory_order_acquire) == number;
    result.push_back(has_refused ? -1 : is_open);
  }
  return result;
}

Group::Control& Group::control() const { return *reinterpret_cast<Control*>(control_->data()); }

Group::Message& Group::message_at(int64_t rank, uint32_t round) const {
  auto* messages =
      reinterpret_cast<Message*>(control_->data() + Control::bytes_before_messages(size()));
  return messages[2 * rank + round % 2];
}

std::string Group::position_of(int64_t rank) const {
  return control().ranks[rank].position.read().value_or("");
}

void Group::publish(const std::string& notice) {
  if (pid_ == getpid()) control().ranks[rank_].notice.write(notice);
}

std::optional<std::string> Group::published(int64_t rank) const {
  return control().ranks[rank].notice.read();
}

bool Group::is_behind(int64_t rank) const {
  return !has_reached(control().ranks[rank].posted.value.load(std::memory_order_acquire), round_);
}

bool Group::is_broken() const { return control().state.load(std::memory_order_acquire) != 0; }

void Group::begin_abort() {
  uint32_t usable = 0;
  if (control().state.compare_exchange_strong(usable, 1)) is_aborting_ = true;
  // What this rank writes next, to memory that others may still read, must not be visible before
  // the state: see check_unbroken. ARM would reorder both.
  std::atomic_thread_fence(std::memory_order_release);
}

void Group::abort(const std::string& reason) {
  if (pid_ != getpid()) return;
  begin_abort();
  if (is_aborting_) {  // else another rank was first, and its reason is kept
    control().reason.write(reason);
    control().state.store(2, std::memory_order_release);
    is_aborting_ = false;
  }
  // Ranks that sleep on any flag must see the state now, not at the end of their sleep.
  for (int64_t r = 0; r < size(); ++r) wake_all(control().ranks[r].posted);
}

void Group::check_unbroken() {
  // The state is read after all that this rank has read in others' memory: see begin_abort.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (!is_broken()) return;
  // The rank that aborted writes its reason in a moment, unless it died.
  for (int i = 0; i < 100 && control().state.load(std::memory_order_acquire) != 2; ++i) {
    usleep(1000);
  }
  fail(WaitError::kBroken, {}, control().reason.read().value_or(""));
}

void Group::check_usable() const {
  if (pid_ != getpid()) {
    throw std::runtime_error(
        "this process was forked from a rank after the model was wrapped, and takes no part in its "
        "transfers; run the model in the parent, or start processes by spawn");
  }
}

void Group::fail(WaitError::Reason reason, std::vector<int64_t> ranks, std::string text) {
  begin_abort();  // before anything that a late peer may still read or write is used again
  throw WaitError(reason, std::move(ranks), std::move(text));
}

char* Group::begin() {
  check_usable();
  check_unbroken();
  // A rank that has posted the last round has read the one before it, whose buffer is reused now.
  for (int64_t r = 0; r < size(); ++r) wait(r, round_);
  return message_at(rank_, round_ + 1).bytes;
}

void Group::post(Op op, uint64_t detail) {
  ++round_;
  op_ = op;
  detail_ = detail;
  Message& local = message_at(rank_, round_);
  local.round = round_;
  local.op = op;
  local.detail = detail;
  raise(control().ranks[rank_].posted, round_);  // releases the message and all writes before it
}

const char* Group::message(int64_t rank) {
  wait(rank, round_);
  // The headers of hooks have been compared before, so this finds only errors of our own, and ranks
  // that an aborted transfer left apart.
  const Message& message = message_at(rank, round_);
  if (message.round != round_ || message.op != op_ || message.detail != detail_) {
    const auto text = [](int64_t rank, uint32_t round, Op op, uint64_t detail) {
      return "rank " + std::to_string(rank) + " (transfer " + std::to_string(round) + ", kind " +
             std::to_string(static_cast<uint32_t>(op)) + ", detail " + std::to_string(detail) + ")";
    };
    fail(WaitError::kOutOfStep, {rank},
         text(rank, message.round, message.op, message.detail) + " does another transfer than " +
             text(rank_, round_, op_, detail_));
  }
  return message.bytes;
}

void Group::wait(int64_t rank, uint32_t round) {
  Flag& posted = control().ranks[rank].posted;
  // The usual case, without a look at the clock.
  if (has_reached(posted.value.load(std::memory_order_acquire), round)) return;
  waiting_since_ = now();
  backoff_.on_poll = [this, rank, round] { on_poll(rank, round); };
  wait_for(posted, round, backoff_);
}

// Called during a long wait for `rank`.
void Group::on_poll(int64_t rank, uint32_t round) {
  // First: whatever ends this wait, the others may report where this rank was.
  control().ranks[rank_].position.write(position_);
  check_unbroken();
  try {
    if (watch_) watch_(now() - waiting_since_);
  } catch (...) {  // such as KeyboardInterrupt: this rank will not take part any more
    begin_abort();
    throw;
  }
  check_unbroken();  // the callback may have taken long, and a rank that aborted has ended since
  const auto is_missing = [&](int64_t r) {
    return !has_reached(control().ranks[r].posted.value.load(std::memory_order_acquire), round);
  };
  // Any rank that has ended, not only the one that is awaited: that one may wait for it in turn.
  std::vector<int64_t> missing, dead;
  for (int64_t r = 0; r < size(); ++r) {
    if (!is_missing(r)) continue;
    missing.push_back(r);
    const bool has_ended = process_start(ranks_[r].pid) != starts_[r];
    if (has_ended && is_missing(r)) dead.push_back(r);  // it may have posted, and then ended
  }
  if (!dead.empty()) fail(WaitError::kDead, dead, "");
  if (now() - waiting_since_ > timeout_s_ && is_missing(rank)) {
    fail(WaitError::kLate, missing, "");
  }
}

ArenaTable& Group::table_of(int64_t rank) const {
  const std::shared_ptr<Segment>& table = peers_[rank].table;
  if (table == nullptr) return Arena::of_process().own_table();
  return *reinterpret_cast<ArenaTable*>(table->data());
}

Group::Reader Group::reader(int64_t rank, int64_t number) {
  // The table's memory is kept as long.
  const auto release = [memory = peers_[rank].table, number, pid = getpid()](ArenaTable* table) {
    if (getpid() == pid) table->release_reader(number);
  };
  return {&table_of(rank), release};
}

std::shared_ptr<CowMapping> Group::views(int64_t rank, const Place& place) {
  std::shared_ptr<CowMapping>& views = peers_[rank].views[place.segment];
  if (views == nullptr) {
    const SegmentAddress& address = table_of(rank).segments[place.segment];
    const bool is_peers = peers_[rank].table != nullptr;
    // The entry may have been used again since that rank freed the segment.
    if (is_peers && peers_[rank].segments.at(place.segment).address().token != address.token) {
      throw std::runtime_error("shared memory: that rank has freed this segment");
    }
    views = std::make_shared<CowMapping>(address);
  }
  return views;
}

char* Group::peer(int64_t rank, const Place& place, int64_t bytes, MemoryRange* range) {
  if (ranks_[rank].pid == pid_) {  // a thread of this process: the arena is shared already
    char* data = Arena::of_process().at(place);
    if (range != nullptr) *range = Arena::of_process().segment_of(data);
    return data;
  }
  // Segments are opened when they are first used: most ranks never reach most of them. What is
  // wrong with an address is found here, because nothing protects the memory behind it.
  Peer& peer = peers_[rank];
  const ArenaTable& table = table_of(rank);
  while (static_cast<int64_t>(peer.segments.size()) <= place.segment) {
    const auto number = static_cast<int64_t>(peer.segments.size());
    if (number >= table.num_segments.load(std::memory_order_acquire)) {
      fail(WaitError::kOutOfStep, {rank}, "an address in a segment that this rank does not have");
    }
    peer.segments.emplace_back();
  }
  Segment& segment = peer.segments[place.segment];
  if (segment.data() == nullptr) segment = Segment::open(table.segments[place.segment]);
  if (place.offset < 0 || place.offset + bytes > segment.bytes()) {
    fail(WaitError::kOutOfStep, {rank}, "an address outside of that rank's memory");
  }
  if (range != nullptr) *range = segment.range();
  return segment.data() + place.offset;
}

}  // namespace flex_model
