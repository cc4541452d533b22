// The ops that copy boxes, on the CPU, in the calling thread: the ranks of a host share its cores.
#include <torch/csrc/stable/library.h>

#include "ops/addresses.h"
#include "ops/many_tensors.h"
#include "ops/reorder.h"

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
  void run() {}
  void run_on_peers(const Ints& barrier) {
    check(barrier.empty(), "pull_: only GPUs have a `barrier`");
  }
  void to_host(const std::vector<Box>& boxes, const char* shard, char* full, const std::string&) {
    for (const Box& box : boxes) assemble_box(box, shard, full);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flex_model, CPU, m) {
  m.impl("assemble", TORCH_BOX(&assemble<Cpu>));
  m.impl("split", TORCH_BOX(&split<Cpu>));
  m.impl("pack", TORCH_BOX(&pack<Cpu>));
  m.impl("pack_tensors", TORCH_BOX(&pack_tensors<Cpu>));
  m.impl("assemble_tensors", TORCH_BOX(&assemble_tensors<Cpu>));
  m.impl("pull_", TORCH_BOX(&pull_<Cpu>));
  m.impl("push", TORCH_BOX(&push<Cpu>));
  m.impl("copy_to_host", TORCH_BOX(&copy_to_host<Cpu>));
}

}  // namespace flex_model
