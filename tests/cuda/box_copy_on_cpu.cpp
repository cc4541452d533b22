// Runs the index maths of the CUDA copy kernel on the CPU, against the plain strided copy of
// boxes.h. Prints what is wrong and returns 1, or returns 0. Built and run by tests/test_ops.py.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "cuda/copy_plan.h"

namespace {

using namespace flex_model;

std::mt19937_64 random_bits(20240817);

int64_t pick(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(random_bits() % static_cast<uint64_t>(high - low + 1));
}

[[noreturn]] void fail(const char* what) {
  std::printf("%s\n", what);
  std::exit(1);
}

void check_divisor(uint32_t value) {
  const Divisor divisor = Divisor::of(value);
  const uint32_t edges[] = {0, 1, value - 1, value, value + 1, 2 * value - 1, (1u << 31) - 1};
  for (uint32_t n : edges) {
    if (n < (1u << 31) && divisor.quotient(n) != n / value) fail("a quotient at an edge is wrong");
  }
  for (int i = 0; i < 1000; ++i) {
    const uint32_t n = static_cast<uint32_t>(pick(0, (int64_t{1} << 31) - 1));
    if (divisor.quotient(n) != n / value) fail("a quotient is wrong");
  }
}

// What a launch does: every chunk of every copy once.
int run_batch(const CopyBatch& batch, int chunk_bytes) {
  if (batch.num_copies < 1 || batch.num_copies > kMaxCopies) fail("a batch of the wrong size");
  for (int c = 0; c < batch.num_copies; ++c) {
    const Copy& copy = batch.copies[c];
    for (uint32_t i = 0; i < copy.num_chunks; ++i) {
      const char* read;
      char* write;
      copy.locate(i, chunk_bytes, &read, &write);
      if (reinterpret_cast<uintptr_t>(read) % chunk_bytes ||
          reinterpret_cast<uintptr_t>(write) % chunk_bytes) {
        fail("a chunk is not aligned");
      }
      std::memcpy(write, read, chunk_bytes);
    }
  }
  return 0;
}

// A box of up to five levels, in a shard and a full tensor with gaps; one in four has a large
// alignment.
Box random_box() {
  const int64_t unit = int64_t{1} << pick(0, 5);
  Box box{0, unit * pick(0, 3), unit * pick(0, 3), unit * pick(1, 9), {}};
  int64_t full = box.run_bytes, shard = box.run_bytes;
  std::vector<Level> levels;  // innermost first
  for (int64_t l = pick(0, 5); l > 0; --l) {
    const Level level{pick(1, 4), full + unit * pick(0, 2), shard + unit * pick(0, 2)};
    full = level.full_stride * level.count;
    shard = level.shard_stride * level.count;
    levels.push_back(level);
  }
  box.levels.assign(levels.rbegin(), levels.rend());
  return box;
}

int64_t end_of(const Box& box, bool full) {
  int64_t end = (full ? box.full_offset : box.shard_offset) + box.run_bytes;
  for (const Level& level : box.levels) {
    end += (level.count - 1) * (full ? level.full_stride : level.shard_stride);
  }
  return end;
}

void check_box(Direction direction, int64_t max_chunks) {
  const Box box = random_box();
  const bool to_full = direction == Direction::kToFull;
  const int64_t shift = pick(0, 1) * pick(0, 15);  // of the shard in its buffer
  std::vector<char> from(end_of(box, !to_full) + shift), to(end_of(box, to_full)), expected;
  for (char& byte : from) byte = static_cast<char>(pick(1, 127));
  expected = to;
  if (to_full) {
    assemble_box(box, from.data() + shift, expected.data());
  } else {
    split_box(box, from.data() + shift, expected.data());
  }

  const Transfer transfer = transfer_of(box, direction, from.data() + shift, to.data());
  const int chunk_bytes = chunk_bytes_of(transfer);
  std::vector<Copy> copies;
  append_copies(transfer, chunk_bytes, max_chunks, &copies);
  for (const Copy& copy : copies) {
    if (copy.num_chunks < 1 || copy.num_chunks > max_chunks)
      fail("a copy has more chunks than allowed");
    CopyBatch batch{};
    batch.copies[0] = copy;
    batch.num_copies = 1;
    run_batch(batch, chunk_bytes);
  }
  if (to != expected) fail("a copy differs from the plain one");

  std::fill(to.begin(), to.end(), 0);
  CopyPlan plan;
  plan.add(box, direction, from.data() + shift, to.data());
  plan.for_each_batch(run_batch);
  if (to != expected) fail("a plan differs from the plain copy");
}

// Many small boxes: several batches, one after the other.
void check_batches() {
  std::vector<char> from(1000), to(1000, 0);
  for (char& byte : from) byte = static_cast<char>(pick(1, 127));
  CopyPlan plan;
  for (int64_t i = 0; i < 100; ++i) {
    plan.add(Box{0, 10 * i, 990 - 10 * i, 10, {}}, Direction::kToFull, from.data(), to.data());
  }
  int64_t launches = 0;
  plan.for_each_batch([&](const CopyBatch& batch, int chunk_bytes) {
    ++launches;
    return run_batch(batch, chunk_bytes);
  });
  for (int64_t i = 0; i < 1000; ++i) {
    if (to[i] != from[990 - i / 10 * 10 + i % 10]) fail("boxes of several batches differ");
  }
  if (launches < 4) fail("more boxes in a batch than it holds");
  if (plan.for_each_batch([](const CopyBatch&, int) { return 7; }) != 7) fail("an error is lost");
}

}  // namespace

int main() {
  for (uint32_t value = 1; value <= 300; ++value) check_divisor(value);
  for (int i = 0; i < 2000; ++i) check_divisor(static_cast<uint32_t>(pick(1, int64_t{1} << 30)));
  check_divisor(1u << 30);
  for (int i = 0; i < 3000; ++i) {
    const Direction direction = i % 2 ? Direction::kToFull : Direction::kToShard;
    check_box(direction, i % 3 ? int64_t{1} << 30 : pick(1, 40));
  }
  check_batches();
  return 0;
}
