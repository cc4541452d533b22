// Flags by which the ranks of one host meet on their GPUs.
//
// Each rank has as many uint32 as there are ranks, in memory that all can reach, zero at first.
// Rank a says that it has come for the n-th time by writing n to word a of every rank's flags; n
// only grows, so nothing is ever reset and a rank may be ahead by one.
#pragma once

#include <cstdint>

namespace flex_model {

constexpr int kMaxPeers = 128;

struct Pads {
  uint32_t* of_rank[kMaxPeers];
  int32_t num_ranks;
  int32_t rank;
};

}  // namespace flex_model
