#include "turn.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <ctime>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flex_model {
namespace {

constexpr double kAwakeS = 2e-4;  // longer turns are long beside what waking costs
constexpr int kSpins = 50;        // looks between yields

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value, double seconds) {
  timespec limit{};
  limit.tv_sec = static_cast<time_t>(seconds);
  limit.tv_nsec = static_cast<long>((seconds - static_cast<double>(limit.tv_sec)) * 1e9);
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, &limit, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

}  // namespace

void Turn::announce() {
  uint32_t asleep = kAsleep;
  if (state_.compare_exchange_strong(asleep, kNear)) wake(state_);
}

void Turn::give() {
  // Who was told that it is near is awake, or looks before it sleeps.
  if (state_.exchange(kHere, std::memory_order_acq_rel) == kAsleep) wake(state_);
}

bool Turn::take(double seconds) {
  const auto start = Clock::now();
  auto near_since = start;
  bool is_awake = false;
  for (int looks = 1;; ++looks) {
    uint32_t state = kHere;
    if (state_.compare_exchange_strong(state, kAsleep, std::memory_order_acq_rel)) return true;
    if (state == kNear) {
      if (!is_awake) near_since = Clock::now();
      is_awake = true;
      if (looks % kSpins == 0) {
        if (seconds_since(near_since) > kAwakeS) {
          state_.compare_exchange_strong(state, kAsleep);
          is_awake = false;
        }
        sched_yield();
      }
      pause();
      continue;
    }
    is_awake = false;
    const double left = seconds - seconds_since(start);
    if (left <= 0) return false;
    const auto before = Clock::now();
    sleep_while(state_, kAsleep, left);
    // Woken by nobody: the time is up, or a signal came, and the caller wants to know.
    if (state_.load() == kAsleep && seconds_since(before) > 0) return false;
  }
}

}  // namespace flex_model
