#include "fork_gate.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <utility>

namespace flex_model {
namespace {

constexpr int kMostMilliseconds = 30000;  // then the child was killed, which the flag can't show

}  // namespace

void ForkGate::before(bool copies) {
  if (!copies || pipe2(ends_, O_CLOEXEC) == 0) return;
  ends_[0] = ends_[1] = -1;
  void* page =
      mmap(nullptr, sizeof(*copied_), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page != MAP_FAILED) copied_ = new (page) std::atomic<bool>(false);
}

// The end of the pipe is reached when the child has closed its end, or died: no message is needed.
void ForkGate::in_parent() {
  close_end(1);
  char byte;
  while (ends_[0] >= 0 && read(ends_[0], &byte, 1) < 0 && errno == EINTR) {
  }
  close_end(0);
  if (copied_ == nullptr) return;
  for (int i = 0; i < kMostMilliseconds && !*copied_; ++i) usleep(1000);
  munmap(std::exchange(copied_, nullptr), sizeof(*copied_));
}

void ForkGate::in_child() {
  if (copied_ != nullptr) {
    *copied_ = true;
    munmap(std::exchange(copied_, nullptr), sizeof(*copied_));
  }
  close_end(0);
  close_end(1);
}

void ForkGate::close_end(int which) {
  const int end = std::exchange(ends_[which], -1);
  if (end >= 0) close(end);
}

}  // namespace flex_model
