// Memory that peers write to during a transfer.
#pragma once

#include <utility>
#include <vector>

#include "arena.h"

namespace flex_model {

// Tensors of this process's arena that peers write to. They are retired until done() is called: if
// the transfer fails in any way, a late peer may still write, so their memory is not reused.
class InFlightTargets {
 public:
  explicit InFlightTargets(std::vector<char*> tensors) : tensors_(std::move(tensors)) {
    for (char* tensor : tensors_) Arena::of_process().retire(tensor);
  }
  void done() {
    for (char* tensor : tensors_) Arena::of_process().reinstate(tensor);
  }

 private:
  std::vector<char*> tensors_;
};

}  // namespace flex_model
