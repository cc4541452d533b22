// Transfers between ranks through two slots and the barrier of csrc/cuda/peers.cu, as
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

#include "cuda/launch.h"

namespace {

constexpr int kWords = 256;

int64_t value_of(int rank, int number) { return 1000 * number + rank; }

}  // namespace

int main(int, char** arguments) {
  const int num_ranks = std::atoi(arguments[1]), num_slots = std::atoi(arguments[2]);
  const int num_transfers = std::atoi(arguments[3]);
  std::vector<std::vector<uint32_t>> pads(num_ranks, std::vector<uint32_t>(num_ranks));
  std::vector<std::vector<int64_t>> slots(num_ranks * num_slots, std::vector<int64_t>(kWords));
  std::vector<flex_model::WaitState> states(num_ranks);
  std::vector<cudaStream_t> streams(num_ranks);
  std::atomic<int64_t> num_wrong{0};
  for (cudaStream_t& stream : streams) cudaStreamCreate(&stream);
  for (int number = 1; number <= num_transfers; ++number) {
    const auto slot = [&slots, num_slots, number](int rank) -> std::vector<int64_t>& {
      return slots[rank * num_slots + number % num_slots];
    };
    const bool is_scatter = number % 3 == 0;  // rank 0 writes what the others read
    for (int rank = 0; rank < num_ranks; ++rank) {
      flex_model::SignalPads signal_pads{{}, num_ranks, rank};
      for (int r = 0; r < num_ranks; ++r) signal_pads.of_rank[r] = pads[r].data();
      emulated::enqueue(streams[rank], [=] {
        for (int to = 0; to < num_ranks; ++to) {
          if (is_scatter ? rank == 0 && to > 0 : to == rank) {
            slot(to).assign(kWords, value_of(to, number));
          }
        }
      });
      flex_model_peer_barrier(&signal_pads, number, uint64_t{60'000'000'000}, &states[rank],
                              streams[rank]);
      emulated::enqueue(streams[rank], [=, &num_wrong] {
        for (int from = 0; from < num_ranks; ++from) {
          if (is_scatter && (from != rank || from == 0)) continue;
          for (int64_t word : slot(from)) num_wrong += word != value_of(from, number);
        }
      });
    }
  }
  for (cudaStream_t stream : streams) cudaStreamSynchronize(stream);
  for (const flex_model::WaitState& state : states) num_wrong += state.missing != 0;
  std::printf("%lld wrong\n", static_cast<long long>(num_wrong.load()));
  return num_wrong != 0;
}
