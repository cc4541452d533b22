#include "descriptor.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace flex_model {

// Slots are listed for the child, and used again, but never freed. Without a lock: threads may open
// and close files while another one forks.
struct Descriptor::Slot {
  static inline std::atomic<Slot*> all{nullptr};

  std::atomic<int> fd{-1};  // -1: the slot is free
  Slot* next = nullptr;
};

Descriptor::Descriptor(int fd) {
  static const int failed = pthread_atfork(nullptr, nullptr, &close_in_child);
  static_cast<void>(failed);  // then children keep the files until exec
  if (fd < 0) return;
  for (slot_ = Slot::all; slot_ != nullptr; slot_ = slot_->next) {
    int none = -1;
    if (slot_->fd.compare_exchange_strong(none, fd)) return;
  }
  slot_ = new Slot;
  slot_->fd = fd;
  slot_->next = Slot::all;
  while (!Slot::all.compare_exchange_weak(slot_->next, slot_)) {
  }
}

Descriptor::~Descriptor() {
  // The slot is free before its file is closed: its number may be another file's from then on.
  const int fd = slot_ == nullptr ? -1 : slot_->fd.exchange(-1);
  if (fd >= 0) close(fd);
}

int Descriptor::get() const { return slot_ == nullptr ? -1 : slot_->fd.load(); }

// The child's own files go to new slots: those of the list still have their owners here.
void Descriptor::close_in_child() noexcept {
  for (Slot* slot = Slot::all.exchange(nullptr); slot != nullptr; slot = slot->next) {
    const int fd = slot->fd.exchange(-1);
    if (fd >= 0) close(fd);
  }
}

}  // namespace flex_model
