// A set of hook groups, by number: a bit set that grows as needed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace flex_model {

class GroupSet {
 public:
  void insert(size_t group) {
    if (group / 64 >= words_.size()) words_.resize(group / 64 + 1, 0);
    words_[group / 64] |= uint64_t{1} << (group % 64);
  }

  void erase(size_t group) {
    if (group / 64 < words_.size()) words_[group / 64] &= ~(uint64_t{1} << (group % 64));
  }

  bool contains(size_t group) const {
    return group / 64 < words_.size() && (words_[group / 64] >> (group % 64) & 1);
  }

  bool overlaps(const GroupSet& other) const {
    const size_t common = std::min(words_.size(), other.words_.size());
    for (size_t i = 0; i < common; ++i) {
      if (words_[i] & other.words_[i]) return true;
    }
    return false;
  }

 private:
  std::vector<uint64_t> words_;
};

}  // namespace flex_model
