#include "fork_gate.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace flex_model {

void ForkGate::before(bool copies) {
  if (!copies || pipe2(ends_, O_CLOEXEC) != 0) ends_[0] = ends_[1] = -1;
}

void ForkGate::in_parent() {
  close_end(1);
  char byte;
  while (ends_[0] >= 0 && read(ends_[0], &byte, 1) < 0 && errno == EINTR) {
  }
  close_end(0);
}

void ForkGate::in_child() {
  close_end(0);
  close_end(1);
}

void ForkGate::close_end(int which) {
  const int end = std::exchange(ends_[which], -1);
  if (end >= 0) close(end);
}

}  // namespace flex_model
