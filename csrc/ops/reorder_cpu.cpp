// assemble, split and pack on the CPU, in the calling thread: the ranks of a host share its cores.
#include "ops/reorder.h"

#include <torch/csrc/stable/library.h>

namespace flex_model {
namespace {

struct Cpu {
  Cpu(const char*, int) {}
  void assemble(const std::vector<Box>& boxes, const std::vector<const char*>& shards, char* full) {
    assemble_boxes(boxes, shards, full);
  }
  void split(const std::vector<Box>& boxes, const char* full, const std::vector<char*>& shards) {
    split_boxes(boxes, full, shards);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flex_model, CPU, m) {
  m.impl("assemble", TORCH_BOX(&assemble<Cpu>));
  m.impl("split", TORCH_BOX(&split<Cpu>));
  m.impl("pack", TORCH_BOX(&pack<Cpu>));
}

}  // namespace flex_model
