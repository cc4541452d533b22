// pack_tensors and assemble_tensors (schema.cpp), on any device; reorder.h has the members of a
// `Device`.
#pragma once

#include "ops/reorder.h"

namespace flex_model {

// A box from a strided tensor (the full side) to the same elements in order (the shard side).
inline Box box_of(const Tensor& tensor, int64_t offset) {
  const int64_t element = tensor.element_size();
  Box box{0, 0, offset, element, {}};
  int64_t packed = element;  // bytes of one step of this dim on the shard side
  for (int64_t d = tensor.dim(); d-- > 0;) {
    const Level level{tensor.size(d), tensor.stride(d) * element, packed};
    packed *= level.count;
    if (level.count == 1) continue;
    if (box.levels.empty() && level.full_stride == box.run_bytes) {
      box.run_bytes *= level.count;
    } else if (!box.levels.empty() &&
               level.full_stride == box.levels.back().count * box.levels.back().full_stride) {
      box.levels.back().count *= level.count;
    } else {
      box.levels.push_back(level);
    }
  }
  std::reverse(box.levels.begin(), box.levels.end());
  return box;
}

template <typename Device>
Tensor pack_tensors(const std::vector<Tensor>& tensors, const Ints& offsets, int64_t total) {
  const char* op = "pack_tensors";
  check(offsets.size() == tensors.size(), op, ": `offsets` must have one entry for each of the ",
        tensors.size(), " tensors, got ", offsets.size());
  check_total(op, total);
  BoxPlan places;  // the tensors as the shards of ranks, for the checks
  for (const Tensor& tensor : tensors) {
    check(tensor.get_device() == tensors[0].get_device(), op,
          ": all tensors must be on one device, got indices ", int{tensors[0].get_device()},
          " and ", int{tensor.get_device()});
    const int64_t rank = static_cast<int64_t>(places.shard_bytes.size());
    places.shard_bytes.push_back(num_bytes(tensor));
    places.boxes.push_back({rank, 0, 0, num_bytes(tensor), {}});
  }
  check_offsets(op, places, offsets, total);
  check_disjoint(op, places, offsets);

  Device device(op, tensors[0].get_device());
  const bool has_gaps = num_copied_bytes(places) != total;
  Tensor packed = has_gaps ? torch::stable::new_zeros(tensors[0], {total}, ScalarType::Byte)
                           : torch::stable::new_empty(tensors[0], {total}, ScalarType::Byte);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].numel() == 0) continue;
    device.split({box_of(tensors[i], offsets[i])}, read_bytes(tensors[i]), {write_bytes(packed)});
  }
  device.run();
  return packed;
}

// Reads lists that have, for each tensor, a length and as many numbers.
class Lists {
 public:
  Lists(const char* op, const char* name, const Ints& numbers)
      : op_(op), name_(name), numbers_(numbers) {}

  Ints next() {
    check(at_ < numbers_.size() && numbers_[at_] >= 0 &&
              static_cast<uint64_t>(numbers_[at_]) < numbers_.size() - at_,
          op_, ": `", name_,
          "` is cut short; it must have a length and as many numbers per tensor");
    const auto begin = numbers_.begin() + at_ + 1;
    const auto end = begin + numbers_[at_];
    at_ += 1 + numbers_[at_];
    return Ints(begin, end);
  }
  bool done() const { return at_ == numbers_.size(); }

 private:
  const char* op_;
  const char* name_;
  const Ints& numbers_;
  size_t at_ = 0;
};

template <typename Device>
std::vector<Tensor> assemble_tensors(const Tensor& gathered, const Ints& offsets, const Ints& codes,
                                     const Ints& sizes, const std::vector<Tensor>& like) {
  const char* op = "assemble_tensors";
  check_buffer(op, "gathered", gathered);
  Lists code_lists(op, "plans", codes), size_lists(op, "sizes", sizes);
  Device device(op, gathered.get_device());
  std::vector<Tensor> fulls;
  size_t at = 0;
  for (const Tensor& tensor : like) {
    const BoxPlan plan = decode_plan(op, code_lists.next());
    const size_t num_ranks = plan.shard_bytes.size();
    check(offsets.size() - at >= num_ranks, op,
          ": `offsets` must have one entry for each rank of each tensor, got ", offsets.size());
    const Ints own(offsets.begin() + at, offsets.begin() + at + num_ranks);
    at += num_ranks;
    check_offsets(op, plan, own, gathered.numel());
    check_filled(op, "a full tensor", num_copied_bytes(plan), plan.full_bytes);
    fulls.push_back(torch::stable::new_empty(gathered, size_lists.next(), tensor.scalar_type()));
    check_num_bytes(op, "sizes", fulls.back(), plan.full_bytes);
    device.assemble(plan.boxes, shards_in(read_bytes(gathered), own), write_bytes(fulls.back()));
  }
  check(at == offsets.size() && code_lists.done() && size_lists.done(), op,
        ": `offsets`, `plans` or `sizes` have more than the ", like.size(), " tensors of `like`");
  device.run();
  return fulls;
}

}  // namespace flex_model
