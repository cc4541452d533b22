// A thread's turn, among threads of which one runs at a time.
//
// A thread that is given the turn is to run where the giver runs: its core has in its caches all
// that they share, Python's objects and the weights, of which each turn writes some (counts of
// references). A turn on the other core costs up to 0.1 ms, and so does it to wake that core from
// sleep on a virtual machine. The kernel would choose the idle core, so the sleeper is bound to
// the giver's before it is woken, and is free again as soon as it runs.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

namespace flex_model {

class Turn {
 public:
  // It is its thread's turn now; taken once, however often it is given. From any thread.
  void give();

  // Wait for it, for `seconds` at most. Whether it came; also false when a signal came.
  bool take(double seconds);

 private:
  enum : uint32_t { kFree = 0, kAsleep, kBeingBound, kHere };

  bool sleep(double seconds);
  void bind_to_this_core();

  std::atomic<uint32_t> state_{kFree};
  pid_t thread_ = 0;   // that sleeps
  cpu_set_t allowed_;  // where it may run
  bool is_bound_ = false;
};

}  // namespace flex_model
