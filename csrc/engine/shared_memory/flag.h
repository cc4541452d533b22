// A counter in shared memory that one process raises and others wait for.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace flex_model {

// Aligned to a cache line, so that waiting for one rank does not slow another one down.
struct alignas(64) Flag {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> num_sleepers;
};

// The stages of a wait: a short spin (unless there are more ranks than processors), then yields of
// the processor, then sleeps. A wake-up costs about 0.1 ms on a virtual machine, so a wait sleeps
// only after it has lasted much longer than that.
struct Backoff {
  bool spins;
  std::function<void()> on_poll;  // called about every 20 ms of a long wait; may throw
};

// Whether `value` is at least `target`; counters may wrap around.
inline bool has_reached(uint32_t value, uint32_t target) {
  return static_cast<int32_t>(value - target) >= 0;
}

// Sets the counter; a waiter that sees the value sees all writes before this call.
void raise(Flag& flag, uint32_t value);

void wait_for(Flag& flag, uint32_t target, const Backoff& backoff);

// Wakes every sleeper, which then calls on_poll.
void wake_all(Flag& flag);

}  // namespace flex_model
