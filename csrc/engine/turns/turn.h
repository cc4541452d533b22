// A thread's turn, among threads of which one runs at a time.
//
// To wake a thread that sleeps costs about 0.1 ms on a virtual machine, as much as a small layer
// takes. So a thread is told when its turn is near, and then waits for it awake, for a while.
#pragma once

#include <atomic>
#include <cstdint>

namespace flex_model {

class Turn {
 public:
  // It is this thread's turn soon. From any thread.
  void announce();

  // It is its turn now; taken once, however often it is given.
  void give();

  // Wait for it, for `seconds` at most. Whether it came; also false when a signal came.
  bool take(double seconds);

 private:
  enum : uint32_t { kAsleep = 0, kNear = 1, kHere = 2 };
  std::atomic<uint32_t> state_{kAsleep};
};

}  // namespace flex_model
