// A barrier of fork(): the parent waits until its child has copied the memory that the child keeps
// and that the parent and its peers will write to.
//
// For handlers of pthread_atfork, which hold one lock from `before` on.
#pragma once

#include <atomic>

namespace flex_model {

class ForkGate {
 public:
  // `copies`: whether the child has memory to copy; otherwise the parent does not wait.
  void before(bool copies);
  void in_parent();  // returns when the child has copied or ended
  void in_child();   // call after the copies

 private:
  void close_end(int which);

  int ends_[2] = {-1, -1};  // of a pipe; the child closes the second
  // A flag in a page that both share, for when no more files can be opened.
  std::atomic<bool>* copied_ = nullptr;
};

}  // namespace flex_model
