// The shared-memory protocol with threads for ranks, on one mapping, so that the thread sanitizer
// sees every access: rounds, transfers of all sizes through arena and messages, leases of all
// threads at once, and a rank that gives up while the others wait.
//
//   threads_as_ranks RANKS STEPS
//
// Exits with 0 if every rank got what it should, and all heard of the rank that gave up.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <thread>

#include "shared_memory/messages.h"
#include "shared_memory/transfer.h"

namespace {

using namespace flex_model;

std::atomic<int> num_wrong{0};

void expect(bool ok, const char* what, int64_t rank, int step) {
  if (ok) return;
  std::fprintf(stderr, "rank %ld, step %d: wrong %s\n", static_cast<long>(rank), step, what);
  ++num_wrong;
}

char byte_of(int64_t rank, int64_t i, int step) {
  return static_cast<char>(rank * 31 + i * 7 + step);
}

// Bytes of all ranks, one after the other.
GatherPlan end_to_end(const std::vector<int64_t>& sizes) {
  std::vector<ElementBox> boxes;
  std::vector<Sizes> shards;
  int64_t total = 0;
  for (size_t r = 0; r < sizes.size(); ++r) {
    boxes.push_back({static_cast<int64_t>(r), {total}, {0}, {sizes[r]}});
    shards.push_back({sizes[r]});
    total += sizes[r];
  }
  return GatherPlan({total}, shards, boxes, 1);
}

struct Buffer {
  Buffer(int64_t bytes, bool pooled)
      : leased(pooled ? Arena::of_process().lease(bytes) : nullptr),
        data(leased != nullptr ? leased : static_cast<char*>(std::malloc(bytes + 1))) {}
  ~Buffer() {
    if (leased != nullptr) {
      Arena::of_process().end_lease(leased);
    } else {
      std::free(data);
    }
  }
  char* leased;
  char* data;
};

void check_whole(const char* got, const std::vector<int64_t>& sizes, int64_t rank, int step) {
  bool ok = true;
  for (size_t r = 0; r < sizes.size(); ++r) {
    for (int64_t i = 0; i < sizes[r]; ++i) ok = ok && *got++ == byte_of(r, i, step);
  }
  expect(ok, "full tensor", rank, step);
}

// A full tensor that outlives its step.
struct Held {
  Owned memory;
  std::vector<int64_t> sizes;
  int step;
};

void run(std::shared_ptr<Segment> control, std::vector<Group::Rank> ranks, int64_t rank,
         int num_steps) {
  Group group(control, ranks, rank);
  group.set_timeout(60);
  std::mt19937 choose(1), own(rank);
  std::deque<Held> held;
  const int64_t size = group.size();
  for (int step = 0; step < num_steps; ++step) {
    std::vector<int64_t> sizes;
    for (int64_t r = 0; r < size; ++r) {
      const int64_t options[] = {
          0, 1, 1000, 16 << 10, (16 << 10) + 1, kMessageBytes, kMessageBytes + 1, 200000};
      sizes.push_back(options[choose() % 8]);
    }
    const GatherPlan plan = end_to_end(sizes);
    Buffer shard(sizes[rank], own() % 2);
    for (int64_t i = 0; i < sizes[rank]; ++i) shard.data[i] = byte_of(rank, i, step);
    Buffer full(plan.box_plan().full_bytes, own() % 3 > 0);
    if (own() % 8 == 0) std::this_thread::yield();
    while (held.size() > own() % 4) {  // given back at any time
      check_whole(held.front().memory.data, held.front().sizes, rank, held.front().step);
      held.pop_front();
    }
    switch (choose() % 6) {
      case 0: {
        all_gather(group, plan, shard.data, {full.data});
        check_whole(full.data, sizes, rank, step);
        break;
      }
      case 5: {  // in memory that the ranks share, until somebody writes to it
        const auto number = static_cast<int64_t>(own() % 3);
        for (Owned& memory : all_gather(group, plan, shard.data, {full.data}, number)) {
          check_whole(memory.data, sizes, rank, step);
          if (own() % 4 == 0) {
            std::memset(memory.data, 77, plan.box_plan().full_bytes);
          } else {
            held.push_back({std::move(memory), sizes, step});
          }
        }
        check_whole(full.data, sizes, rank, step);
        break;
      }
      case 1: {
        std::vector<int64_t> everyone(size);
        for (int64_t r = 0; r < size; ++r) everyone[r] = r;
        gather_to_first(group, {{&plan, everyone, shard.data, rank == 0 ? full.data : nullptr}});
        if (rank == 0) check_whole(full.data, sizes, rank, step);
        break;
      }
      case 4: {  // each rank writes by its own means, or leaves it to the end
        std::vector<int64_t> everyone(size);
        for (int64_t r = 0; r < size; ++r) everyone[r] = r;
        const std::vector<Gathered> tensors{
            {&plan, everyone, nullptr, rank == 0 ? full.data : nullptr}};
        OpenGather gather(group, tensors);
        const OpenGather::Target& target = gather.target(0);
        const char* left = shard.data;
        if (target.full != nullptr && own() % 2) {
          const char* begin = target.segment.data;
          expect(begin <= target.full && target.full < begin + target.segment.bytes, "segment",
                 rank, step);
          std::vector<const char*> shards(size, nullptr);
          shards[rank] = shard.data;
          std::vector<Box> boxes;
          for (const Box& box : plan.box_plan().boxes) {
            if (box.rank == rank) boxes.push_back(box);
          }
          assemble_boxes(boxes, shards, target.full);
          left = nullptr;
        }
        gather.end({left});
        if (rank == 0) check_whole(full.data, sizes, rank, step);
        break;
      }
      case 2: {
        if (rank == 0) {
          char* at = full.data;
          for (int64_t r = 0; r < size; ++r) {
            for (int64_t i = 0; i < sizes[r]; ++i) *at++ = byte_of(r, i, step);
          }
        }
        Buffer mine(sizes[rank], false);
        scatter_from_first(group, plan, rank == 0 ? full.data : nullptr, mine.data);
        if (rank == 0)
          std::memset(full.data, 0, plan.box_plan().full_bytes);  // may change from now on
        expect(std::memcmp(mine.data, shard.data, sizes[rank]) == 0, "shard", rank, step);
        break;
      }
      default: {
        const int64_t mine[2] = {rank, step};
        std::vector<int64_t> all(2 * size);
        exchange(group, reinterpret_cast<const char*>(mine), sizeof(mine),
                 reinterpret_cast<char*>(all.data()));
        for (int64_t r = 0; r < size; ++r) {
          expect(all[2 * r] == r && all[2 * r + 1] == step, "message", rank, step);
        }
      }
    }
  }
  held.clear();
  // The last rank gives up instead of coming; the others hear it while they wait.
  if (rank == size - 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    group.abort("had enough");
    return;
  }
  try {
    char byte = 0;
    std::vector<char> all(size);
    exchange(group, &byte, 1, all.data());
    expect(size == 1, "end", rank, num_steps);
  } catch (const WaitError& error) {
    expect(error.reason == WaitError::kBroken && error.text == "had enough", "reason", rank,
           num_steps);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t num_ranks = argc > 1 ? std::atoi(argv[1]) : 3;
  const int num_steps = argc > 2 ? std::atoi(argv[2]) : 200;
  auto control = std::make_shared<Segment>(Group::make_control(num_ranks));
  const std::vector<Group::Rank> ranks(num_ranks, {getpid(), Arena::of_process().table()});
  std::vector<std::thread> threads;
  for (int64_t r = 0; r < num_ranks; ++r) threads.emplace_back(run, control, ranks, r, num_steps);
  for (std::thread& thread : threads) thread.join();
  expect(Arena::of_process().leased_bytes() == 0, "leases at the end", -1, num_steps);
  return num_wrong == 0 ? 0 : 1;
}
