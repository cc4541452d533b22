// pull_, push and copy_to_host (schema.cpp), on any device. Besides the members in reorder.h, a
// `Device` has
//   run_on_peers(barrier)   as run(), for shards in the memory of other GPUs, after the barrier
//       unless it is empty
//   to_host(boxes, shard, full, how)   assembles one rank's boxes in host memory, and starts it
#pragma once

#include "ops/reorder.h"

namespace flex_model {

// Returns the boxes in rank order, beginning with rank `first` and wrapping around.
inline std::vector<Box> rotated(const BoxPlan& plan, int64_t first) {
  std::vector<Box> boxes = plan.boxes;
  const auto middle = std::find_if(boxes.begin(), boxes.end(),
                                   [first](const Box& box) { return box.rank >= first; });
  std::rotate(boxes.begin(), middle, boxes.end());
  return boxes;
}

inline char* at_address(int64_t address) { return reinterpret_cast<char*>(address); }

inline void check_addresses(const char* op, const BoxPlan& plan, const Ints& addresses) {
  check(addresses.size() == plan.shard_bytes.size(), op,
        ": `addresses` must have one entry for each of the plan's ", plan.shard_bytes.size(),
        " ranks, got ", addresses.size());
}

template <typename Device>
void pull_(const Tensor& full, const Ints& addresses, const Ints& code, int64_t first,
           const Ints& barrier) {
  const char* op = "pull_";
  const BoxPlan plan = decode_plan_of(op, full, code);
  check_addresses(op, plan, addresses);
  check_rank(op, plan, first);
  check_filled(op, "the full tensor", num_copied_bytes(plan), plan.full_bytes);
  std::vector<const char*> shards;
  for (int64_t address : addresses) shards.push_back(at_address(address));
  for (const Box& box : plan.boxes) {
    check(num_bytes(box) == 0 || shards[box.rank] != nullptr, op,
          ": the plan needs the shard of rank ", box.rank, ", whose address is 0");
  }
  Device device(op, full.get_device());
  device.assemble(rotated(plan, first), shards, write_bytes(full));
  device.run_on_peers(barrier);
}

template <typename Device>
void push(const Tensor& full, const Ints& addresses, const Ints& code, int64_t first) {
  const char* op = "push";
  const BoxPlan plan = decode_plan_of(op, full, code);
  check_addresses(op, plan, addresses);
  check_rank(op, plan, first);
  std::vector<char*> shards;
  for (int64_t address : addresses) shards.push_back(at_address(address));
  Device device(op, full.get_device());
  device.split(rotated(plan, first), read_bytes(full), shards);
  device.run_on_peers({});
}

template <typename Device>
void copy_to_host(const Tensor& shard, int64_t address, const Ints& code, int64_t rank,
                  std::string how) {
  const char* op = "copy_to_host";
  check_contiguous(op, "shard", shard);
  const BoxPlan plan = decode_plan(op, code);
  check_rank(op, plan, rank);
  check_num_bytes(op, "shard", shard, plan.shard_bytes[rank]);
  check(how == "auto" || how == "copy engine" || how == "kernel", op,
        ": `how` must be \"auto\", \"copy engine\" or \"kernel\", got \"", how, "\"");
  check(address != 0 || num_bytes(shard) == 0, op, ": `address` is 0");
  std::vector<Box> boxes;
  for (const Box& box : plan.boxes) {
    if (box.rank == rank) boxes.push_back(box);
  }
  Device device(op, shard.get_device());
  device.to_host(boxes, read_bytes(shard), at_address(address), how);
}

}  // namespace flex_model
