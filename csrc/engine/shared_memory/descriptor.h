// A file descriptor that forked children don't keep. Exec closes it too (O_CLOEXEC), but a child
// may live on without one, after the ranks have ended: it would keep their memory allocated.
#pragma once

#include <utility>

namespace flex_model {

class Descriptor {
 public:
  // Owns `fd`; negative for none.
  explicit Descriptor(int fd = -1);
  Descriptor(Descriptor&& other) noexcept : slot_(std::exchange(other.slot_, nullptr)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(slot_, other.slot_);
    return *this;
  }
  ~Descriptor();

  int get() const;  // negative if there is none, and in a child forked since

 private:
  struct Slot;
  static void close_in_child() noexcept;

  Slot* slot_ = nullptr;
};

}  // namespace flex_model
