// Memory that peers write to during a transfer.
#pragma once

#include <utility>
#include <vector>

#include "arena.h"

namespace flex_model {

// Tensors of this process's arena that peers write to. Until it is done they are retired: if the
// transfer fails, in whichever way, a peer that is late may write yet, and nobody else shall have
// their memory then.
class Offer {
 public:
  explicit Offer(std::vector<char*> tensors) : tensors_(std::move(tensors)) {
    for (char* tensor : tensors_) Arena::of_process().retire(tensor);
  }
  void done() {
    for (char* tensor : tensors_) Arena::of_process().reinstate(tensor);
  }

 private:
  std::vector<char*> tensors_;
};

}  // namespace flex_model
