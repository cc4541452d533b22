// The `Device` (ops/reorder.h, ops/addresses.h) of the CUDA ops: copies boxes on the device of
// their input, on its current stream.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <utility>

#include "cuda/box_copy_plan.h"
#include "cuda/host_copy.h"
#include "cuda/launch.h"
#include "ops/check.h"

namespace flex_model {

// What fills the links between GPUs, and leaves the rest of the multiprocessors to the model: 512
// KB in flight, with 64 bytes per thread. Chosen, not measured; PyTorch's kernels of this kind have
// as many threads (nccl_all_gather_offset: 32 blocks of 256).
constexpr uint32_t kPeerBlocks = 64;

// Decodes the `barrier` of an op (schema.cpp).
inline Barrier barrier_of(const char* op, const Ints& code) {
  const int64_t num_ranks = static_cast<int64_t>(code.size()) - 4;
  check(num_ranks > 0, op, ": `barrier` must have 4 entries and a signal pad per rank, got ",
        code.size());
  check(num_ranks <= kMaxPeers, op, ": expected at most ", kMaxPeers, " ranks, got ", num_ranks);
  const int64_t rank = code[0], timeout_ms = code[2];
  check(rank >= 0 && rank < num_ranks, op, ": rank must be in [0, ", num_ranks - 1, "], got ",
        rank);
  check(timeout_ms >= 0 && code[3] != 0, op,
        ": the timeout of `barrier` must not be negative, its state not 0");
  Barrier barrier{};
  barrier.state = reinterpret_cast<WaitState*>(code[3]);
  barrier.timeout_ns = static_cast<uint64_t>(timeout_ms) * 1'000'000;
  barrier.number = static_cast<uint32_t>(code[1]);
  barrier.num_ranks = static_cast<int32_t>(num_ranks);
  barrier.rank = static_cast<int32_t>(rank);
  for (int64_t r = 0; r < num_ranks; ++r) {
    check(code[4 + r] != 0, op, ": the signal pad of rank ", r, " has no address");
    barrier.pads[r] = reinterpret_cast<uint32_t*>(code[4 + r]);
  }
  return barrier;
}

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

  void run_on_peers(const Ints& barrier_code) {
    if (barrier_code.empty()) return run(copies_, kPeerBlocks);
    const Barrier barrier = barrier_of(op_, barrier_code);
    if (copies_.empty()) return pass(barrier);
    run(copies_, kPeerBlocks, &barrier);
  }

  void pass(const Barrier& barrier) { check_started(flex_model_peer_barrier(&barrier, stream())); }

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
    const Barrier* barrier;  // of the next launch; those after it need none
    void* stream;
    int operator()(const SmallBatch& batch, const Cut& cut) {
      return flex_model_copy_small(&batch, cut, max_blocks, std::exchange(barrier, {}), stream);
    }
    int operator()(const LargeBatch& batch, const Cut& cut) {
      return flex_model_copy_large(&batch, cut, max_blocks, std::exchange(barrier, {}), stream);
    }
  };

  void run(CopyPlan& copies, uint32_t max_blocks, const Barrier* barrier = nullptr) {
    if (copies.empty()) return;
    check_started(copies.for_each_batch(Launch{max_blocks, barrier, stream()}));
  }

  const char* op_;
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;  // null: not looked up yet, or the default stream's handle
  CopyPlan copies_;
};

}  // namespace flex_model
