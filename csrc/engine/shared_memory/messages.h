// Transfers of bytes inside the messages of a group's rounds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "group.h"

namespace flex_model {

using Bytes = std::unique_ptr<char[]>;

inline int64_t largest(const std::vector<int64_t>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

// Gathers `bytes` bytes of every rank at `all`, in rank order. Collective.
void exchange(Group& group, const char* local, int64_t bytes, char* all);

// Sends every rank's bytes through the messages, piece by piece. `into` gets a buffer per rank;
// null on ranks that don't receive. Collective.
void stream(Group& group, const char* local, const std::vector<int64_t>& bytes_of_rank,
            std::vector<Bytes>* into);

// Returns when every rank has posted what this one has.
void wait_for_all(Group& group);

}  // namespace flex_model
