// Signal pads: the flags of the barrier between the GPUs of one host.
//
// A rank's pad has one uint32 per rank, in memory that all ranks can access, zero at first. Rank a
// signals its n-th arrival by writing n to word a of every rank's pad; n only grows, so nothing is
// ever reset and a rank may be ahead by one.
#pragma once

#include <cstdint>

namespace flex_model {

constexpr int kMaxPeers = 128;

// In page-locked host memory: what a wait found, and whether waits shall end.
struct WaitState {
  int32_t missing;  // written by kernels: 1 + a rank that did not arrive
  int32_t is_over;  // written by the host
};

// This rank's `number`-th arrival, and its wait for the others, `timeout_ns` at most.
struct Barrier {
  uint32_t* pads[kMaxPeers];  // by rank
  volatile WaitState* state;
  uint64_t timeout_ns;
  uint32_t number;
  int32_t num_ranks;
  int32_t rank;
};

}  // namespace flex_model
