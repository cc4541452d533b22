// The barrier between GPUs, inside a kernel.
#pragma once

#include "cuda/gpu.cuh"
#include "cuda/peers.h"

namespace flex_model {

constexpr uint64_t kLookNs = 100'000;  // between looks at host memory, which take a microsecond

// Signals this rank's arrival and waits for the others: called by all threads of every block, of
// which the first have a peer each.
//
// Earlier launches of the stream are what a signal releases, so each block may signal; and each
// does, because blocks that only waited could keep the one that signals from running, on all ranks
// at once. All blocks wait for all peers: then those have read what they wanted of the transfer
// before, once the kernel ends.
//
// A peer that never arrives must not block the GPU indefinitely, and a trap would destroy the
// user's CUDA context: after the deadline, or when the host aborts, the wait records the peer and
// ends, and the host raises before data that was read too early leaves a run. Other waits end with
// it.
__device__ __forceinline__ void wait_for_peers(const Barrier& barrier) {
  const int peer = threadIdx.x;
  if (peer < barrier.num_ranks && peer != barrier.rank) {
    store_release(barrier.pads[peer] + barrier.rank, barrier.number);
    const uint32_t* flag = barrier.pads[barrier.rank] + peer;
    const uint64_t start = now_ns();
    uint64_t looks_at = kLookNs;
    while (static_cast<int32_t>(load_acquire(flag) - barrier.number) < 0) {
      const uint64_t waited = now_ns() - start;
      bool is_over = waited > barrier.timeout_ns;
      if (waited > looks_at) {
        looks_at = waited + kLookNs;
        is_over = is_over || barrier.state->is_over || barrier.state->missing;
      }
      if (is_over) {
        barrier.state->missing = 1 + peer;
        __threadfence_system();
        break;
      }
      __nanosleep(100);
    }
  }
  __syncthreads();
}

}  // namespace flex_model
