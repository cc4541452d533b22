#include "flag.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flex_model {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpins = 150;  // some 4 us: longer ones would hold up a rank on the same core
constexpr auto kYielding = std::chrono::milliseconds(1);
constexpr auto kAsleep = std::chrono::milliseconds(20);

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

uint32_t* word(std::atomic<uint32_t>& value) { return reinterpret_cast<uint32_t*>(&value); }

// Sleeps until the value differs from `seen`, a wake-up, or 20 ms have passed. The kernel compares
// the value once more after a full barrier, and sleeps only if it is still the one that was seen.
void sleep_while(Flag& flag, uint32_t seen) {
  const timespec limit{0, std::chrono::nanoseconds(kAsleep).count()};
  flag.num_sleepers.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, word(flag.value), FUTEX_WAIT, seen, &limit, nullptr, 0);
  flag.num_sleepers.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace

void raise(Flag& flag, uint32_t value) {
  // Sequentially consistent on both sides: either we see the sleeper, or it sees the value. With
  // release and acquire, both could miss the other, and the sleeper would lose 20 ms.
  flag.value.store(value, std::memory_order_seq_cst);
  if (flag.num_sleepers.load(std::memory_order_seq_cst) > 0) wake_all(flag);
}

// Without FUTEX_PRIVATE_FLAG, here and above: sleepers are other processes.
void wake_all(Flag& flag) {
  syscall(SYS_futex, word(flag.value), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void wait_for(Flag& flag, uint32_t target, const Backoff& backoff) {
  const auto is_there = [&] {
    return has_reached(flag.value.load(std::memory_order_acquire), target);
  };
  if (is_there()) return;
  if (backoff.spins) {
    for (int i = 0; i < kSpins; ++i) {
      pause();
      if (is_there()) return;
    }
  }
  const auto start = Clock::now();
  do {
    sched_yield();
    if (is_there()) return;
  } while (Clock::now() - start < kYielding);
  for (;;) {
    const uint32_t seen = flag.value.load(std::memory_order_seq_cst);
    if (has_reached(seen, target)) return;
    sleep_while(flag, seen);
    if (is_there()) return;
    backoff.on_poll();
  }
}

}  // namespace flex_model
