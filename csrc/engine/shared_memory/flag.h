// One number in shared memory that one process raises and others wait for.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace flex_model {

// On a cache line of its own: waiting for one rank does not slow another down.
struct alignas(64) Flag {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> num_sleepers;
};

// How a wait goes: first a short spin (unless there are more ranks than processors), then yields,
// then sleeps. To be woken costs about 0.1 ms on a virtual machine, so sleeping begins only after a
// wait that is much longer than that.
struct Patience {
  bool spins;
  std::function<void()> look_around;  // every 20 ms or so of a long wait; may throw
};

// Whether `value` has come to `wanted`; numbers may wrap around.
inline bool has_reached(uint32_t value, uint32_t wanted) {
  return static_cast<int32_t>(value - wanted) >= 0;
}

// All writes before it are seen by who waited for it.
void raise(Flag& flag, uint32_t value);

void wait_for(Flag& flag, uint32_t wanted, const Patience& patience);

// Every sleeper wakes up and looks around.
void wake_all(Flag& flag);

}  // namespace flex_model
