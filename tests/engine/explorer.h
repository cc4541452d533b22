// Runs small concurrent programs in every order that the memory model of C++11 allows, so that a
// missing acquire, release or fence is found on any machine (x86 hides most of them).
//
// A Program has places in memory, and threads that are lists of steps. An atomic place keeps every
// value that was stored to it, in order. A load may return any of them that is not older than what
// its thread knows; that is how stale values arise. A thread learns more when it acquires what
// another one released. A plain place must not be accessed by two threads unless one access
// happens before the other.
//
// All states are visited, each once; of orders that differ only in steps that no other thread can
// observe, one. Not covered: a store that takes effect before an earlier load
// of its thread; stores of several threads to one place in another order than they ran in;
// consume. Loops must be unrolled; a loop that polls is one step, `await`.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

namespace explorer {

constexpr int kMaxPlaces = 32;
constexpr int kMaxThreads = 16;

enum Order { kRelaxed, kAcquire, kRelease, kAcqRel, kSeqCst };
inline bool acquires(Order order) { return order != kRelaxed && order != kRelease; }
inline bool releases(Order order) { return order != kRelaxed && order != kAcquire; }

using Value = uint32_t;
using Registers = std::array<Value, 4>;  // of a thread, zero at first
using Condition = std::function<bool(const Registers&)>;
using Accepts = std::function<bool(Value)>;

inline Condition is(int reg, Value value) {
  return [=](const Registers& r) { return r[reg] == value; };
}

// What a thread knows, by place: the oldest value that it may still load; by thread: how many of
// its steps have happened before.
struct Knowledge {
  std::array<uint8_t, kMaxPlaces> seen{};
  std::array<uint8_t, kMaxThreads> steps{};

  void join(const Knowledge& other) {
    for (int i = 0; i < kMaxPlaces; ++i) seen[i] = std::max(seen[i], other.seen[i]);
    for (int i = 0; i < kMaxThreads; ++i) steps[i] = std::max(steps[i], other.steps[i]);
  }
};

struct Step {
  enum Kind { kLoad, kStore, kUpdate, kFence, kRead, kWrite, kCheck, kBranch } kind;
  int place = -1;
  Order order = kRelaxed;
  Value value = 0;      // stored, added or written; expected by kRead; kBranch: where to go
  int reg = -1;         // receives the value that was loaded
  Accepts accepts;      // kLoad, kUpdate: the values that the step waits for
  Condition condition;  // kCheck: must hold; kBranch: jumps if it does not
  bool adds = true;     // kUpdate: else it replaces the value
};

class Thread {
 public:
  Thread& store(int place, Value value, Order order) {
    return add({Step::kStore, place, order, value});
  }
  Thread& load(int place, int reg, Order order) {
    return add({Step::kLoad, place, order, 0, reg, nullptr});
  }
  // Polls until a value is accepted.
  Thread& await(int place, Accepts accepts, Order order, int reg = -1) {
    return add({Step::kLoad, place, order, 0, reg, std::move(accepts)});
  }
  // Read-modify-writes: atomic addition, and a replacement that waits for an accepted value.
  Thread& fetch_add(int place, Value value, Order order, int reg = -1) {
    return add({Step::kUpdate, place, order, value, reg, nullptr});
  }
  Thread& exchange_when(int place, Accepts accepts, Value value, Order order) {
    return add({Step::kUpdate, place, order, value, -1, std::move(accepts), nullptr, false});
  }
  Thread& fence(Order order) { return add({Step::kFence, -1, order}); }
  // Accesses to plain places; `read` must find the value.
  Thread& read(int place, Value value) { return add({Step::kRead, place, kRelaxed, value}); }
  Thread& write(int place, Value value) { return add({Step::kWrite, place, kRelaxed, value}); }
  Thread& check(Condition condition) {
    return add({Step::kCheck, -1, kRelaxed, 0, -1, nullptr, std::move(condition)});
  }
  // The steps that `body` adds run only if the condition holds.
  Thread& when(Condition condition, const std::function<void()>& body) {
    add({Step::kBranch, -1, kRelaxed, 0, -1, nullptr, std::move(condition)});
    const size_t branch = steps.size() - 1;
    body();
    steps[branch].value = static_cast<Value>(steps.size());
    return *this;
  }

  std::vector<Step> steps;

 private:
  Thread& add(Step step) {
    steps.push_back(std::move(step));
    return *this;
  }
};

// The result of an exploration: `finding` is empty if nothing is wrong, else "data race",
// "wrong value", "check failed", or "stuck" (no thread can go on); `trace` is how it came about.
struct Result {
  std::string finding, trace;
  size_t num_states = 0;
};

class Program {
 public:
  explicit Program(int num_threads) : threads_(num_threads) {}
  Thread& operator[](int thread) { return threads_[thread]; }

  int place(std::string name, Value value = 0) {
    names_.push_back(std::move(name));
    values_.push_back(value);
    return static_cast<int>(names_.size()) - 1;
  }
  std::vector<int> places(const std::string& name, int count, Value value = 0) {
    std::vector<int> result;
    for (int i = 0; i < count; ++i) result.push_back(place(name + std::to_string(i), value));
    return result;
  }

  Result explore() {
    State start{std::vector<Place>(values_.size()), std::vector<Runner>(threads_.size()), {}};
    for (size_t p = 0; p < values_.size(); ++p) start.places[p].stored.push_back({values_[p], {}});
    result_ = {};
    visited_.clear();
    find_flags();
    settle(start);
    if (result_.finding.empty()) visit(start);
    result_.num_states = visited_.size();
    return result_;
  }

 private:
  struct Stored {
    Value value;
    Knowledge released;  // what a thread learns that acquires this value
  };
  struct Place {
    std::vector<Stored> stored;  // of a plain place: the last value only
    int writer = -1;             // of a plain place: the thread, and when; and each thread's last
    uint8_t written_at = 0;      // read
    std::array<uint8_t, kMaxThreads> read_at{};
  };
  struct Runner {
    size_t at = 0;  // the next step
    Registers registers{};
    Knowledge knows;
    Knowledge loaded;    // what an acquire fence would add
    Knowledge released;  // what the last release fence published
  };
  struct State {
    std::vector<Place> places;
    std::vector<Runner> runners;
    std::array<uint8_t, kMaxPlaces> seq_cst;  // the last store in the one order of kSeqCst
  };

  // A flag: it is only stored to, always releasing. Whoever awaits a value of it may take the first
  // one that is accepted, at once: a later one of the same thread, or of one that knows of the
  // first, only adds to what is known; and that of any other thread is the first in another order.
  void find_flags() {
    is_flag_.assign(values_.size(), true);
    for (const Thread& thread : threads_) {
      for (const Step& step : thread.steps) {
        const bool is_store = step.kind == Step::kStore && releases(step.order);
        if (step.kind == Step::kUpdate || (step.kind == Step::kStore && !is_store)) {
          is_flag_[step.place] = false;
        }
      }
    }
  }

  // Runs each thread up to the next step whose order counts. The others are its own business:
  // accesses to plain places, too, since a race is found in any order that has it.
  void settle(State& state) {
    for (int t = 0; t < static_cast<int>(threads_.size()); ++t) {
      Runner& runner = state.runners[t];
      while (result_.finding.empty() && runner.at < threads_[t].steps.size()) {
        if (!run_local(state, t, threads_[t].steps[runner.at])) break;
      }
    }
  }

  // Runs a step if its order does not count.
  bool run_local(State& state, int t, const Step& step) {
    Runner& runner = state.runners[t];
    if (step.accepts && step.reg < 0 && is_flag_[step.place] && step.order != kSeqCst) {
      const std::vector<size_t> found = choices(state, t, step);
      if (!found.empty()) run(state, t, step, found.front());
      return !found.empty();
    }
    Knowledge& knows = runner.knows;
    size_t next = runner.at + 1;
    switch (step.kind) {
      case Step::kBranch:
        if (!step.condition(runner.registers)) next = step.value;
        break;
      case Step::kCheck:
        if (!step.condition(runner.registers)) result_.finding = "check failed";
        break;
      case Step::kRead:
      case Step::kWrite:
        access(state.places[step.place], step, knows, t, static_cast<uint8_t>(next));
        break;
      case Step::kFence:
        if (step.order == kSeqCst) return false;
        if (acquires(step.order)) knows.join(runner.loaded);
        if (releases(step.order)) runner.released = knows;
        break;
      default: return false;
    }
    runner.at = next;
    knows.steps[t] = static_cast<uint8_t>(next);
    if (!result_.finding.empty()) note(t, step, step.value);
    return true;
  }

  void access(Place& place, const Step& step, const Knowledge& knows, int t, uint8_t now) {
    bool is_ordered =
        place.writer < 0 || place.writer == t || knows.steps[place.writer] >= place.written_at;
    for (int other = 0; step.kind == Step::kWrite && other < kMaxThreads; ++other) {
      is_ordered &= other == t || knows.steps[other] >= place.read_at[other];
    }
    if (!is_ordered) {
      result_.finding = "data race";
    } else if (step.kind == Step::kWrite) {
      place.stored[0].value = step.value;
      place.writer = t;
      place.written_at = now;
    } else {
      place.read_at[t] = now;
      if (place.stored[0].value != step.value) result_.finding = "wrong value";
    }
  }

  // Visits all states that can follow. False after a finding. A thread that polls may miss all
  // values but the last one, so it is stuck if that is not accepted.
  bool visit(const State& state) {
    if (!visited_.insert(hash(state)).second) return true;
    bool can_go_on = false, is_done = true;
    for (int t = 0; t < static_cast<int>(threads_.size()); ++t) {
      if (state.runners[t].at >= threads_[t].steps.size()) continue;
      is_done = false;
      const Step& step = threads_[t].steps[state.runners[t].at];
      for (const size_t choice : choices(state, t, step)) {
        can_go_on |= !step.accepts || choice + 1 == state.places[step.place].stored.size();
        State next = state;
        const Value value = run(next, t, step, choice);
        settle(next);
        if (result_.finding.empty() && visit(next)) continue;
        note(t, step, value);
        return false;
      }
    }
    if (!can_go_on && !is_done) result_.finding = "stuck";
    return can_go_on || is_done;
  }

  // Which of the values of its place the step may load.
  static std::vector<size_t> choices(const State& state, int t, const Step& step) {
    if (step.kind == Step::kStore || step.kind == Step::kFence) return {0};
    const std::vector<Stored>& stored = state.places[step.place].stored;
    size_t first = state.runners[t].knows.seen[step.place];
    if (step.order == kSeqCst) first = std::max<size_t>(first, state.seq_cst[step.place]);
    if (step.kind == Step::kUpdate) first = stored.size() - 1;  // nothing comes in between
    std::vector<size_t> result;
    for (size_t i = first; i < stored.size(); ++i) {
      if (!step.accepts || step.accepts(stored[i].value)) result.push_back(i);
    }
    return result;
  }

  // Runs an atomic step; returns the value that it loaded or stored.
  static Value run(State& state, int t, const Step& step, size_t choice) {
    Runner& runner = state.runners[t];
    Knowledge& knows = runner.knows;
    knows.steps[t] = static_cast<uint8_t>(++runner.at);
    if (step.kind == Step::kFence) {
      knows.join(runner.loaded);
      for (int p = 0; p < kMaxPlaces; ++p) {
        knows.seen[p] = state.seq_cst[p] = std::max(knows.seen[p], state.seq_cst[p]);
      }
      runner.released = knows;
      return 0;
    }
    std::vector<Stored>& stored = state.places[step.place].stored;
    Stored next{step.value, runner.released};
    Value value = step.value;
    if (step.kind != Step::kStore) {
      const Stored& from = stored[choice];
      value = from.value;
      if (step.reg >= 0) runner.registers[step.reg] = value;
      knows.seen[step.place] = std::max(knows.seen[step.place], static_cast<uint8_t>(choice));
      runner.loaded.join(from.released);
      if (acquires(step.order)) knows.join(from.released);
      if (step.kind == Step::kLoad) return value;
      if (step.adds) next.value += from.value;
      next.released.join(from.released);  // an update goes on with what it replaces has released
    }
    const auto last = static_cast<uint8_t>(stored.size());
    knows.seen[step.place] = last;
    if (step.order == kSeqCst) state.seq_cst[step.place] = last;
    if (releases(step.order)) next.released.join(knows);
    stored.push_back(next);
    return value;
  }

  static uint64_t hash(const State& state) {
    std::string bytes;
    const auto append = [&](const auto& value) {
      bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
    };
    for (const Place& place : state.places) {
      append(place.stored.size());
      for (const Stored& each : place.stored) append(each);
      append(place.writer);
      append(place.written_at);
      append(place.read_at);
    }
    for (const Runner& runner : state.runners) append(runner);
    append(state.seq_cst);
    return std::hash<std::string_view>()(bytes);  // 64 bits: two of a million states rarely agree
  }

  void note(int t, const Step& step, Value value) {
    static const char* const kinds[] = {"load", "store", "update", "fence",
                                        "read", "write", "check",  "branch"};
    const std::string name = step.place < 0 ? "" : " " + names_[step.place];
    result_.trace = "  thread " + std::to_string(t) + ": " + kinds[step.kind] + name + " " +
                    std::to_string(value) + "\n" + result_.trace;
  }

  std::vector<Thread> threads_;
  std::vector<std::string> names_;
  std::vector<Value> values_;
  std::vector<bool> is_flag_;  // by place
  std::unordered_set<uint64_t> visited_;
  Result result_;
};

}  // namespace explorer
