// Holds a parent back, in a fork, until its child has copied what it keeps of memory that the
// parent and its peers go on to write to.
//
// For handlers of pthread_atfork, under one lock from `before` on.
#pragma once

#include <atomic>

namespace flex_model {

class ForkGate {
 public:
  // Without `copies`, the child has nothing to copy and the parent does not wait.
  void before(bool copies);
  void in_parent();  // returns when the child has copied, or is gone
  void in_child();   // it has

 private:
  void close_end(int which);

  int ends_[2] = {-1, -1};  // of a pipe, whose second one is the child's
  // Where no more files may be open: a page of both, in which the child tells.
  std::atomic<bool>* told_ = nullptr;
};

}  // namespace flex_model
