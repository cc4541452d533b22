// The `Device` (ops/reorder.h, ops/addresses.h) of the CUDA ops: copies boxes on the device of
// their input, on its current stream.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "cuda/box_copy_plan.h"
#include "cuda/host_copy.h"
#include "cuda/launch.h"
#include "ops/check.h"

namespace flex_model {

// What fills the links between GPUs, and leaves the rest of the multiprocessors to the model: 512
// KB in flight, with 64 bytes per thread. Chosen, not measured; PyTorch's kernels of this kind have
// as many threads (nccl_all_gather_offset: 32 blocks of 256).
constexpr uint32_t kPeerBlocks = 64;

class Cuda {
 public:
  Cuda(const char* op, int32_t device) : op_(op), device_(device), guard_(device) {}

  void assemble(const std::vector<Box>& boxes, const std::vector<const char*>& shards, char* full) {
    for (const Box& box : boxes) {
      if (shards[box.rank] != nullptr) copies_.add(box, Direction::kToFull, shards[box.rank], full);
    }
  }

  void split(const std::vector<Box>& boxes, const char* full, const std::vector<char*>& shards) {
    for (const Box& box : boxes) {
      if (shards[box.rank] != nullptr)
        copies_.add(box, Direction::kToShard, full, shards[box.rank]);
    }
  }

  void run() { run(copies_, 0); }
  void run_on_peers() { run(copies_, kPeerBlocks); }

  void to_host(const std::vector<Box>& boxes, const char* shard, char* full,
               const std::string& how) {
    if (boxes.empty()) return;
    void* mapped = nullptr;
    check_started(flex_model_mapped_address(full, &mapped));
    check(mapped != nullptr, op_, ": the host memory at ", static_cast<const void*>(full),
          " is not page-locked; register it with CUDA (cudaHostRegister) first");
    CopyPlan by_kernel;
    for (const Box& box : boxes) {
      if (num_bytes(box) == 0) continue;
      const Transfer transfer = transfer_of(box, Direction::kToFull, shard, full);
      std::vector<RowCopy> rows;
      const bool by_engine = how == "copy engine" || (how == "auto" && suits_copy_engine(transfer));
      if (!by_engine) {
        by_kernel.add(box, Direction::kToFull, shard, static_cast<char*>(mapped));
        continue;
      }
      append_row_copies(transfer, std::numeric_limits<int64_t>::max(), &rows);
      for (const RowCopy& row : rows) check_started(flex_model_copy_rows(&row, stream()));
    }
    run(by_kernel, kHostBlocks);
  }

  void* stream() {
    if (stream_ == nullptr) {
      TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream_));
    }
    return stream_;
  }

  void check_started(int error) const {
    check(error == 0, op_, ": CUDA device ", device_,
          " failed to start the op: ", error ? flex_model_cuda_error(error) : "",
          "; if earlier work on the device failed, CUDA_LAUNCH_BLOCKING=1 finds it. If there is no "
          "kernel for this device, rebuild with TORCH_CUDA_ARCH_LIST set for it");
  }

 private:
  struct Launch {
    uint32_t max_blocks;
    void* stream;
    int operator()(const SmallBatch& batch, const Cut& cut) const {
      return flex_model_copy_small(&batch, cut, max_blocks, stream);
    }
    int operator()(const LargeBatch& batch, const Cut& cut) const {
      return flex_model_copy_large(&batch, cut, max_blocks, stream);
    }
  };

  void run(CopyPlan& copies, uint32_t max_blocks) {
    if (!copies.empty()) check_started(copies.for_each_batch(Launch{max_blocks, stream()}));
  }

  const char* op_;
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;  // null: not looked up yet, or the default stream's handle
  CopyPlan copies_;
};

}  // namespace flex_model
