// assemble, split and pack (schema.cpp) except for the copies: they check, allocate, and call the
// `Device`, which copies.
//
// A `Device` is made before the result is allocated, so that it can choose where. It has
//   Device(op, index)
//   assemble(boxes, shards, full), split(boxes, full, shards)   as assemble_boxes and split_boxes
//       of boxes.h; the boxes of a null shard are skipped
//   run()   starts the copies added since the last call, in as few launches as possible
#pragma once

#include <torch/csrc/stable/ops.h>

#include "ops/check.h"

namespace flex_model {

// Rejects tensors without memory: instances of tensor subclasses that wrap other tensors.
inline void check_memory(const Tensor& tensor, const void* data) {
  check(data != nullptr || tensor.numel() == 0, "flex_model: a tensor of sizes ", sizes_of(tensor),
        " has no memory at its address; pass a plain one");
}

inline const char* read_bytes(const Tensor& tensor) {
  const void* data = tensor.const_data_ptr();
  check_memory(tensor, data);
  return static_cast<const char*>(data);
}

inline char* write_bytes(const Tensor& tensor) {
  void* data = tensor.mutable_data_ptr();
  check_memory(tensor, data);
  return static_cast<char*>(data);
}

// Returns where the shard of each rank begins; null if it is absent.
template <typename Byte>
std::vector<Byte*> shards_in(Byte* buffer, const Ints& offsets) {
  std::vector<Byte*> shards;
  for (int64_t offset : offsets) shards.push_back(offset == -1 ? nullptr : buffer + offset);
  return shards;
}

template <typename Device>
Tensor assemble(const Tensor& gathered, const Ints& offsets, const Ints& code, const Ints& sizes,
                ScalarType dtype) {
  const char* op = "assemble";
  check_buffer(op, "gathered", gathered);
  const BoxPlan plan = decode_plan(op, code);
  check_offsets(op, plan, offsets, gathered.numel());
  check_filled(op, "the full tensor", num_copied_bytes(plan), plan.full_bytes);

  Device device(op, gathered.get_device());
  Tensor full = torch::stable::new_empty(gathered, sizes, dtype);
  check_num_bytes(op, "sizes", full, plan.full_bytes);
  device.assemble(plan.boxes, shards_in(read_bytes(gathered), offsets), write_bytes(full));
  device.run();
  return full;
}

template <typename Device>
Tensor split(const Tensor& full, const Ints& code, int64_t rank, const Ints& sizes) {
  const char* op = "split";
  const BoxPlan plan = decode_plan_of(op, full, code);
  check_rank(op, plan, rank);
  check_filled(op, "the shard", num_copied_bytes(plan, rank), plan.shard_bytes[rank]);

  Device device(op, full.get_device());
  Tensor shard = torch::stable::new_empty(full, sizes);
  check_num_bytes(op, "sizes", shard, plan.shard_bytes[rank]);
  std::vector<char*> shards(plan.shard_bytes.size(), nullptr);
  shards[rank] = write_bytes(shard);
  device.split(plan.boxes, read_bytes(full), shards);
  device.run();
  return shard;
}

template <typename Device>
Tensor pack(const Tensor& full, const Ints& code, const Ints& offsets, int64_t total) {
  const char* op = "pack";
  const BoxPlan plan = decode_plan_of(op, full, code);
  check_total(op, total);
  check_offsets(op, plan, offsets, total);
  check_disjoint(op, plan, offsets);

  Device device(op, full.get_device());
  const bool has_gaps = num_copied_bytes(plan) != total;
  Tensor packed = has_gaps ? torch::stable::new_zeros(full, {total}, ScalarType::Byte)
                           : torch::stable::new_empty(full, {total}, ScalarType::Byte);
  device.split(plan.boxes, read_bytes(full), shards_in(write_bytes(packed), offsets));
  device.run();
  return packed;
}

}  // namespace flex_model
