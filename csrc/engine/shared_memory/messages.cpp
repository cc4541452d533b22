#include "messages.h"

#include <cstring>

namespace flex_model {

void exchange(Group& group, const char* local, int64_t bytes, char* all) {
  for (int64_t at = 0; at < bytes; at += kMessageBytes) {
    const int64_t piece = std::min(bytes - at, kMessageBytes);
    std::memcpy(group.begin(), local + at, piece);
    group.post(Op::kExchange, bytes);
    for (int64_t r = 0; r < group.size(); ++r) {
      std::memcpy(all + r * bytes + at, group.message(r), piece);
    }
  }
}

void stream(Group& group, const char* local, const std::vector<int64_t>& bytes_of_rank,
            std::vector<Bytes>* into) {
  const int64_t total = largest(bytes_of_rank);
  if (into != nullptr) {
    into->clear();
    for (int64_t bytes : bytes_of_rank) into->emplace_back(new char[std::max<int64_t>(1, bytes)]);
  }
  for (int64_t at = 0; at < total; at += kMessageBytes) {
    const auto piece = [&](int64_t rank) {
      return std::clamp<int64_t>(bytes_of_rank[rank] - at, 0, kMessageBytes);
    };
    char* message = group.begin();
    if (piece(group.rank()) > 0) std::memcpy(message, local + at, piece(group.rank()));
    group.post(Op::kStream, at);
    // A rank that only sends takes part in every round: begin() waits for its posts.
    if (into == nullptr) continue;
    for (int64_t r = 0; r < group.size(); ++r) {
      const char* sent = group.message(r);
      if (piece(r) > 0) std::memcpy((*into)[r].get() + at, sent, piece(r));
    }
  }
}

// Reads every rank's message of this round, which is what checks that they are at the same one.
void wait_for_all(Group& group) {
  for (int64_t r = 0; r < group.size(); ++r) group.message(r);
}

}  // namespace flex_model
