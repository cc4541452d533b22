// Transfers between ranks through two slots and the barrier of csrc/cuda/barrier.cuh, as
// peer_memory.py makes them: a rank is a stream. Built with the thread sanitizer, which watches
// them.
//   barrier NUM_RANKS NUM_SLOTS NUM_TRANSFERS    prints the number of wrong words; 1 if there are
//   any
//
// With one slot a rank writes where a slower one still reads.
#include <cuda_runtime.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/box_copy_plan.h"
#include "cuda/launch.h"

namespace {

using namespace flex_model;

constexpr int kWords = 2048;  // of a slot: two tiles

int64_t value_of(int rank, int number) { return 1000 * number + rank; }

}  // namespace

int main(int, char** arguments) {
  const int num_ranks = std::atoi(arguments[1]), num_slots = std::atoi(arguments[2]);
  const int num_transfers = std::atoi(arguments[3]);
  std::vector<std::vector<uint32_t>> pads(num_ranks, std::vector<uint32_t>(num_ranks));
  std::vector<std::vector<int64_t>> slots(num_ranks * num_slots, std::vector<int64_t>(kWords));
  std::vector<std::vector<int64_t>> fulls(num_ranks, std::vector<int64_t>(num_ranks * kWords));
  std::vector<WaitState> states(num_ranks);
  std::vector<cudaStream_t> streams(num_ranks);
  std::atomic<int64_t> num_wrong{0};
  for (cudaStream_t& stream : streams) cudaStreamCreate(&stream);
  for (int number = 1; number <= num_transfers; ++number) {
    const auto slot = [&slots, num_slots, number](int rank) -> std::vector<int64_t>& {
      return slots[rank * num_slots + number % num_slots];
    };
    const bool is_scatter = number % 3 == 0;  // rank 0 writes what the others read
    for (int rank = 0; rank < num_ranks; ++rank) {
      cudaStream_t stream = streams[rank];
      Barrier barrier{};
      for (int r = 0; r < num_ranks; ++r) barrier.pads[r] = pads[r].data();
      barrier.state = &states[rank];
      barrier.timeout_ns = uint64_t{60'000'000'000};
      barrier.number = number;
      barrier.num_ranks = num_ranks;
      barrier.rank = rank;
      emulated::enqueue(stream, [=] {
        for (int to = 0; to < num_ranks; ++to) {
          if (is_scatter ? rank == 0 && to > 0 : to == rank) {
            slot(to).assign(kWords, value_of(to, number));
          }
        }
      });
      if (is_scatter && rank == 0) {
        flex_model_peer_barrier(&barrier, stream);
        continue;
      }
      CopyPlan pull;
      const auto reads = [=](int from) { return !is_scatter || from == rank; };
      for (int from = 0; from < num_ranks; ++from) {
        const auto* source = reinterpret_cast<const char*>(slot(from).data());
        auto* target = reinterpret_cast<char*>(fulls[rank].data() + from * kWords);
        if (reads(from)) pull.add({0, 0, 0, 8 * kWords, {}}, Direction::kToFull, source, target);
      }
      struct Launch {
        const Barrier* barrier;
        cudaStream_t stream;
        int operator()(const SmallBatch& batch, const Cut& cut) const {
          return flex_model_copy_small(&batch, cut, 3, barrier, stream);
        }
        int operator()(const LargeBatch& batch, const Cut& cut) const {
          return flex_model_copy_large(&batch, cut, 3, barrier, stream);
        }
      };
      pull.for_each_batch(Launch{&barrier, stream});
      emulated::enqueue(stream, [=, &fulls, &num_wrong] {
        for (int i = 0; i < num_ranks * kWords; ++i) {
          const int from = i / kWords;
          num_wrong += reads(from) && fulls[rank][i] != value_of(from, number);
        }
      });
    }
  }
  for (cudaStream_t stream : streams) cudaStreamSynchronize(stream);
  for (const WaitState& state : states) num_wrong += state.missing != 0;
  std::printf("%lld wrong\n", static_cast<long long>(num_wrong.load()));
  return num_wrong != 0;
}
