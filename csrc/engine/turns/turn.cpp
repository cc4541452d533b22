#include "turn.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

namespace flex_model {
namespace {

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

void Turn::give() {
  uint32_t state = state_.load();
  while (state == kFree || state == kAsleep) {
    if (!state_.compare_exchange_weak(state, state == kFree ? kHere : kBeingBound)) continue;
    if (state == kAsleep) {
      bind_to_this_core();
      state_.store(kHere);
      wake(state_);
    }
    return;
  }
}

bool Turn::take(double seconds) {
  uint32_t state = kHere;
  if (state_.compare_exchange_strong(state, kFree)) return true;
  thread_ = gettid();
  if (sched_getaffinity(0, sizeof(allowed_), &allowed_) != 0) CPU_ZERO(&allowed_);
  state = kFree;
  const bool came = !state_.compare_exchange_strong(state, kAsleep) || sleep(seconds);
  if (came) state_.store(kFree);
  if (is_bound_) sched_setaffinity(0, sizeof(allowed_), &allowed_);
  is_bound_ = false;
  return came;
}

bool Turn::sleep(double seconds) {
  sleep_while(state_, kAsleep, seconds);
  uint32_t state = kAsleep;
  // Woken by nobody: the time is up, or a signal came, and the caller wants to know.
  if (state_.compare_exchange_strong(state, kFree)) return false;
  while (state_.load() != kHere) sched_yield();  // the giver is about to
  return true;
}

// A hint: where it is refused, the sleeper runs anywhere.
void Turn::bind_to_this_core() {
  const int core = sched_getcpu();
  if (core < 0 || CPU_COUNT(&allowed_) < 2 || !CPU_ISSET(core, &allowed_)) return;
  cpu_set_t here;
  CPU_ZERO(&here);
  CPU_SET(core, &here);
  is_bound_ = sched_setaffinity(thread_, sizeof(here), &here) == 0;
}

}  // namespace flex_model
