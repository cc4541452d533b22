// Runs the plans for copies to host memory on the CPU, against the plain strided copy of boxes.h.
// Prints what is wrong and returns 1, or returns 0. Built and run by tests/cuda/test_cuda_maths.py.
#include "cuda/host_copy.h"

#include <cstdio>
#include <cstdlib>
#include <random>

namespace {

using namespace flex_model;

std::mt19937_64 random_bits(20240818);

int64_t pick(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(random_bits() % static_cast<uint64_t>(high - low + 1));
}

[[noreturn]] void fail(const char* what) {
  std::printf("%s\n", what);
  std::exit(1);
}

void check_rows(const std::vector<RowCopy>& copies) {
  for (const RowCopy& copy : copies) {
    if (copy.num_rows > 1 && (copy.from_pitch < copy.row_bytes || copy.to_pitch < copy.row_bytes ||
                              copy.from_pitch > kMaxPitch || copy.to_pitch > kMaxPitch)) {
      fail("CUDA would refuse a pitch");
    }
    if (copy.num_rows < 1) fail("a copy has no row");
  }
}

// A random box of up to four levels: the copies of rows make what the plain copy makes.
void check_box() {
  Box box{0, pick(0, 5), pick(0, 5), pick(1, 20), {}};
  int64_t full = box.run_bytes, shard = box.run_bytes;
  std::vector<Level> levels;
  for (int64_t l = pick(0, 4); l > 0; --l) {
    const Level level{pick(1, 4), full + pick(0, 3), shard + pick(0, 3)};
    full = level.full_stride * level.count;
    shard = level.shard_stride * level.count;
    levels.push_back(level);
  }
  box.levels.assign(levels.rbegin(), levels.rend());
  std::vector<char> from(box.shard_offset + shard), to(box.full_offset + full), expected(to.size());
  for (char& byte : from) byte = static_cast<char>(pick(1, 127));
  assemble_box(box, from.data(), expected.data());

  std::vector<RowCopy> copies;
  const Transfer transfer = transfer_of(box, Direction::kToFull, from.data(), to.data());
  if (!append_row_copies(transfer, 1 << 20, &copies)) fail("a box of few rows is refused");
  check_rows(copies);
  for (const RowCopy& copy : copies) {
    for (int64_t row = 0; row < copy.num_rows; ++row) {
      std::memcpy(copy.to + row * copy.to_pitch, copy.from + row * copy.from_pitch, copy.row_bytes);
    }
  }
  if (to != expected) fail("copies of rows differ from the plain copy");
}

Transfer rows_of(int64_t row_bytes, int64_t rows, int64_t pitch, int64_t outer) {
  Transfer transfer{nullptr, nullptr, row_bytes, {}};
  if (rows > 1) transfer.steps.push_back({rows, row_bytes, pitch});
  if (outer > 1) transfer.steps.push_back({outer, row_bytes * rows, pitch * rows + 4096});
  return transfer;
}

void check_choice() {
  const int64_t gib = int64_t{1} << 30;
  if (!suits_copy_engine(rows_of(1, 1, 0, 1))) fail("one run is the copy engine's");
  if (!suits_copy_engine(rows_of(4096, 1 << 20, 8192, 1))) fail("long rows are the copy engine's");
  if (suits_copy_engine(rows_of(64, 1 << 20, 8192, 1))) fail("short rows are the kernel's");
  if (suits_copy_engine(rows_of(4096, 8, 8192, 65))) fail("many copies are the kernel's");
  if (!suits_copy_engine(rows_of(4096, 8, 8192, 64))) fail("few copies are the copy engine's");
  if (!suits_copy_engine(rows_of(3 * gib, 4, 6 * gib, 1))) fail("large rows are copied one by one");
  std::vector<RowCopy> copies;
  append_row_copies(rows_of(3 * gib, 4, 6 * gib, 1), kMaxRowCopies, &copies);
  if (copies.size() != 4) fail("a pitch that CUDA would refuse");
  check_rows(copies);
}

}  // namespace

int main() {
  for (int i = 0; i < 3000; ++i) check_box();
  check_choice();
  return 0;
}
