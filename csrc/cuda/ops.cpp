// assemble, split and pack on CUDA: on the device of the input and its current stream. What is
// checked and allocated is the CPU's (ops/reorder.h); fingerprint is CPU only, as the schema says.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "cuda/copy_plan.h"
#include "cuda/launch.h"
#include "ops/reorder.h"

namespace flex_model {
namespace {

class Cuda {
 public:
  Cuda(const char* op, int32_t device) : op_(op), device_(device), guard_(device) {}

  void assemble(const std::vector<Box>& boxes, const std::vector<const char*>& shards, char* full) {
    CopyPlan copies;
    for (const Box& box : boxes) copies.add(box, Direction::kToFull, shards[box.rank], full);
    launch(copies);
  }

  void split(const std::vector<Box>& boxes, const char* full, const std::vector<char*>& shards) {
    CopyPlan copies;
    for (const Box& box : boxes) {
      if (shards[box.rank] != nullptr) copies.add(box, Direction::kToShard, full, shards[box.rank]);
    }
    launch(copies);
  }

 private:
  void launch(const CopyPlan& copies) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    const int error = copies.for_each_batch([&](const CopyBatch& batch, int chunk_bytes) {
      return flex_model_copy_boxes(&batch, chunk_bytes, stream);
    });
    check(error == 0, op_, ": the kernel did not start on CUDA device ", device_, ": ",
          error ? flex_model_cuda_error(error) : "",
          "; if earlier work on the device failed, CUDA_LAUNCH_BLOCKING=1 finds it. If there is no "
          "kernel for this "
          "device, rebuild with TORCH_CUDA_ARCH_LIST set for it");
  }

  const char* op_;
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flex_model, CUDA, m) {
  m.impl("assemble", TORCH_BOX(&assemble<Cuda>));
  m.impl("split", TORCH_BOX(&split<Cuda>));
  m.impl("pack", TORCH_BOX(&pack<Cuda>));
}

}  // namespace flex_model
