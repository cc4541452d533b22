// Any numbers as the code of a plan: refused by name, or a plan whose copies stay inside its
// buffers. `main` mutates valid codes at random.
//
//   plan_codes SEED RUNS

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "boxes/boxes.h"

using flex_model::Box;
using flex_model::BoxPlan;

namespace {

constexpr int64_t kMostBytes = 1 << 16;  // of the buffers that are allocated to copy in

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "plan_codes: %s\n", what);
  std::abort();
}

// Copies both ways, in buffers of exactly the sizes that the plan says, for the sanitizer to see.
void copy(const BoxPlan& plan) {
  if (plan.full_bytes > kMostBytes) return;
  for (const int64_t size : plan.shard_bytes) {
    if (size > kMostBytes) return;
  }
  std::unique_ptr<char[]> full(new char[plan.full_bytes]());
  std::vector<std::unique_ptr<char[]>> buffers;
  std::vector<char*> shards;
  for (const int64_t size : plan.shard_bytes) {
    buffers.emplace_back(new char[size]());
    shards.push_back(buffers.back().get());
  }
  flex_model::split_boxes(plan.boxes, full.get(), shards);
  const std::vector<const char*> sources(shards.begin(), shards.end());
  flex_model::assemble_boxes(plan.boxes, sources, full.get());
  for (size_t rank = 0; rank < shards.size(); ++rank) {
    flex_model::assemble_into_each(plan.boxes, static_cast<int64_t>(rank), shards[rank],
                                   {full.get()});
  }
}

void check_code(const uint8_t* data, size_t size) {
  std::vector<int64_t> code(size / sizeof(int64_t));
  if (!code.empty()) std::memcpy(code.data(), data, code.size() * sizeof(int64_t));
  try {
    const BoxPlan plan = BoxPlan::decode(code.data(), static_cast<int64_t>(code.size()));
    expect(plan.encode() == code, "a decoded plan has another code");
    copy(plan);
  } catch (const std::invalid_argument&) {
  }
}

using Random = std::mt19937_64;

int64_t below(Random& random, int64_t limit) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
}

// Ranks that each hold some rows of two columns' pieces: boxes with levels, side by side.
BoxPlan valid_plan(Random& random) {
  const int64_t ranks = 1 + below(random, 4), rows = 1 + below(random, 5);
  const int64_t run = 1 + below(random, 9), outer = 1 + below(random, 3);
  const bool empty = random() % 16 == 0;
  BoxPlan plan;
  plan.full_bytes = outer * rows * ranks * run;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    plan.shard_bytes.push_back(outer * rows * run);
    Box box{rank, rank * run, 0, run, {}};
    if (outer > 1) box.levels.push_back({outer, rows * ranks * run, rows * run});
    box.levels.push_back({rows, ranks * run, run});
    if (empty) {  // many steps, of nothing
      box.run_bytes = 0;
      box.levels.front() = {int64_t{1} << 61, 0, 0};
    }
    plan.boxes.push_back(box);
  }
  return plan;
}

int64_t any_number(Random& random) {
  static const int64_t edges[] = {
      0,  1,  2,         16384,         int64_t{1} << 31, int64_t{1} << 62,
      -1, -2, INT64_MAX, INT64_MAX - 1, INT64_MIN,        INT64_MAX / 2};
  if (random() % 2) return edges[random() % (sizeof(edges) / sizeof(edges[0]))];
  return random() % 4 ? below(random, 64) : static_cast<int64_t>(random());
}

}  // namespace

int main(int, char** arguments) {
  Random random(std::strtoull(arguments[1], nullptr, 10));
  int64_t accepted = 0;
  for (long left = std::atol(arguments[2]); left > 0; --left) {
    std::vector<int64_t> code = valid_plan(random).encode();
    for (int64_t change = below(random, 6); change > 0 && !code.empty(); --change) {
      const size_t at = random() % code.size();
      switch (random() % 5) {
        case 0: code.erase(code.begin() + at); break;
        case 1: code.insert(code.begin() + at, any_number(random)); break;
        case 2: code.resize(at); break;
        case 3: code[at] = (code[at] & 0xffff) + below(random, 9) - 4; break;
        default: code[at] = any_number(random);
      }
    }
    try {
      BoxPlan::decode(code.data(), static_cast<int64_t>(code.size()));
      ++accepted;
    } catch (const std::invalid_argument&) {
    }
    check_code(reinterpret_cast<const uint8_t*>(code.data()), code.size() * 8);
  }
  std::printf("%ld\n", static_cast<long>(accepted));
}
