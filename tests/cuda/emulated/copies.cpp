// Copies of random boxes by the kernels and by the copy engine, through the C functions that the
// ops call, against the plain strided copy of boxes.h. Prints what is wrong and returns 1, or
// returns 0.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "cuda/host_copy.h"

namespace {

using namespace flex_model;

constexpr int64_t kCacheBytes = 1 << 20;  // of an emulated device

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

struct Launch {
  uint32_t max_blocks;
  int* num_launches = nullptr;
  int operator()(const SmallBatch& batch, const Cut& cut) const {
    if (num_launches != nullptr) ++*num_launches;
    return flex_model_copy_small(&batch, cut, max_blocks, nullptr, nullptr);
  }
  int operator()(const LargeBatch& batch, const Cut& cut) const {
    if (num_launches != nullptr) ++*num_launches;
    return flex_model_copy_large(&batch, cut, max_blocks, nullptr, nullptr);
  }
};

// Memory of a device, with a margin on either side: aligned loads reach up to 15 bytes beyond what
// they are for.
struct Buffer {
  static constexpr int64_t kMargin = 256;
  std::vector<char> expected;
  char* memory;
  char* data;

  explicit Buffer(int64_t size, int low = 0, int high = 0)
      : expected(size + 2 * kMargin),
        memory(static_cast<char*>(emulated::allocate(expected.size(), 0))),
        data(memory + kMargin) {
    cudaDeviceSynchronize();
    for (char& byte : expected) byte = static_cast<char>(pick(low, high));
    std::memcpy(memory, expected.data(), expected.size());
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { emulated::release(memory); }

  char* expected_data() { return expected.data() + kMargin; }
  void check(const char* what) {  // the margins, too
    cudaDeviceSynchronize();
    if (std::memcmp(memory, expected.data(), expected.size())) fail(what);
  }
  void clear() { std::memset(memory, 0, expected.size()); }
};

// A box of up to five levels, in a shard and a full tensor with gaps.
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

// The copies of rows must be what CUDA accepts; the runtime refuses others.
void copy_rows(const Transfer& transfer, char* host) {
  std::vector<RowCopy> copies;
  if (!append_row_copies(transfer, 1 << 20, &copies)) fail("a box of few rows is refused");
  for (RowCopy& copy : copies) {
    copy.to = host + (copy.to - transfer.to);
    if (flex_model_copy_rows(&copy, nullptr)) fail("CUDA would refuse a copy of rows");
  }
}

// A step from piece to piece leads where a division does.
void check_steps(const Copy& copy) {
  for (uint32_t i = 0; i + kWarp < copy.num_pieces; ++i) {
    Place place = copy.place_of(i);
    copy.advance(i + kWarp, &place);
    const Place expected = copy.place_of(i + kWarp);
    if (place.from != expected.from || place.to != expected.to || place.in_run != expected.in_run ||
        place.runs_left != expected.runs_left) {
      fail("a step leads elsewhere");
    }
  }
}

void check_box(Direction direction, int64_t max_pieces) {
  const Box box = random_box();
  const bool to_full = direction == Direction::kToFull;
  const int64_t shift = pick(0, 1) * pick(0, 15), to_shift = pick(0, 1) * pick(0, 15);
  Buffer from(end_of(box, !to_full) + shift, 1, 127), to(end_of(box, to_full) + to_shift);
  char* const expected = to.expected_data() + to_shift;
  if (to_full) {
    assemble_box(box, from.data + shift, expected);
  } else {
    split_box(box, from.data + shift, expected);
  }
  const Transfer transfer = transfer_of(box, direction, from.data + shift, to.data + to_shift);
  const int unit = chunk_bytes_of(transfer);
  for (const Cut& cut : {Cut{unit, false}, Cut{std::min(unit, 4), true}}) {
    std::vector<Copy> copies;
    append_copies(transfer, cut, max_pieces, &copies);
    for (const Copy& copy : copies) {
      if (copy.num_pieces < 1 || copy.num_pieces > max_pieces) fail("a copy has too many pieces");
      check_steps(copy);
      SmallBatch batch{};
      batch.copies[0] = copy;
      batch.arrange(1);
      if (Launch{0}(batch, cut)) fail("a launch is refused");
    }
    to.check(cut.windows ? "a copy by windows is wrong" : "a copy by chunks is wrong");
    to.clear();
  }
  CopyPlan plan;
  plan.add(box, direction, from.data + shift, to.data + to_shift);
  if (plan.for_each_batch(Launch{static_cast<uint32_t>(pick(0, 3))})) fail("a plan is refused");
  to.check("a plan is wrong");
  const char* begin = expected + (transfer.to - (to.data + to_shift));
  std::vector<char> host(to.expected.data() + to.expected.size() - begin);
  copy_rows(transfer, host.data());
  cudaDeviceSynchronize();
  if (std::memcmp(host.data(), begin, host.size())) fail("copies of rows are wrong");
}

// Boxes of all widths at once: one launch if it is little, several if it is much.
void check_many_boxes(int64_t num_boxes, int64_t run_bytes, int64_t rows) {
  const int64_t width = run_bytes + 3, size = num_boxes * width * rows;
  Buffer from(size, 1, 127), to(size);
  CopyPlan plan;
  for (int64_t i = 0; i < num_boxes; ++i) {
    const int64_t bytes = pick(1, run_bytes), at = i * width;
    const Box box{0, at, at + pick(0, 3), bytes, {{rows, num_boxes * width, num_boxes * width}}};
    plan.add(box, Direction::kToFull, from.data, to.data);
    assemble_box(box, from.data, to.expected_data());
  }
  int num_launches = 0;
  plan.for_each_batch(Launch{0, &num_launches});
  to.check("many boxes are wrong");
  const int64_t few = (num_boxes + 239) / 240;
  if (size < (1 << 20) && num_launches != few) fail("little work takes more launches than one");
  if (num_launches > few + 7) fail("too many launches");
  if (plan.for_each_batch([](const auto&, const Cut&) { return 7; }) != 7) fail("an error is lost");
}

// Every way that two sides can be aligned.
void check_shifts() {
  Buffer from(300, 1, 127);
  for (int64_t source = 0; source < 16; ++source) {
    for (int64_t target = 0; target < 16; ++target) {
      for (int64_t bytes : {1, 15, 16, 17, 31, 32, 33, 64, 100}) {
        Buffer to(300);
        const Transfer transfer{from.data + source, to.data + target, bytes, {}};
        std::vector<Copy> copies;
        append_copies(transfer, {1, true}, 1 << 20, &copies);
        SmallBatch batch{};
        batch.copies[0] = copies.at(0);
        batch.arrange(1);
        if (Launch{0}(batch, {1, true})) fail("a shifted copy is refused");
        std::memcpy(to.expected_data() + target, transfer.from, bytes);
        to.check("a shifted copy is wrong");
      }
    }
  }
}

// Addresses beyond 4 GiB, which are computed and not touched.
void check_large() {
  const char* from = reinterpret_cast<const char*>(uintptr_t{1} << 40);
  char* to = reinterpret_cast<char*>(uintptr_t{1} << 41);
  const int64_t gib = int64_t{1} << 30;
  for (const Cut& cut : {Cut{16, false}, Cut{2, true}}) {
    const Transfer run{from, to, 40 * gib, {}};
    const Transfer rows{from, to, 10 * gib, {{4, 10 * gib, 11 * gib}}};
    for (const Transfer& transfer : {run, rows}) {
      std::vector<Copy> copies;
      append_copies(transfer, cut, gib, &copies);
      int64_t covered = 0;
      for (const Copy& copy : copies) {
        const int64_t num_runs = copy.num_pieces / copy.run.value, last = copy.run_bytes - 16;
        covered += copy.run_bytes * num_runs;
        const Place place = copy.place_of(copy.num_pieces - (cut.windows ? 2 : 1));
        const char* read = place.from + int64_t{place.in_run} * 16;
        char* write = place.to + int64_t{place.in_run} * 16;
        if (cut.windows) {
          const Window window = copy.window_at(place);
          read = window.from, write = window.to;
        }
        if (num_runs == 1 && (read != copy.from + last || write != copy.to + last)) {
          fail("a large copy ends elsewhere");
        }
      }
      if (covered != 40 * gib) fail("a large copy is not covered");
    }
  }
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
  if (!suits_copy_engine(rows_of(256, 1 << 20, 512, 1))) fail("rows of 256 bytes are long");
  if (suits_copy_engine(rows_of(255, 1 << 20, 512, 1))) fail("short rows are the kernel's");
  if (suits_copy_engine(rows_of(4096, 8, 8192, 65))) fail("many copies are the kernel's");
  if (!suits_copy_engine(rows_of(4096, 8, 8192, 64))) fail("few copies are the copy engine's");
  if (!suits_copy_engine(rows_of(3 * gib, 4, 6 * gib, 1))) fail("large rows are copied one by one");
  std::vector<RowCopy> copies;
  append_row_copies(rows_of(3 * gib, 4, 6 * gib, 1), kMaxRowCopies, &copies);
  if (copies.size() != 4) fail("a pitch that CUDA would refuse");
}

// How large the grid is, and which copies leave other data in the cache.
void check_launch(int64_t num_bytes, bool windows, uint32_t max_blocks, uint32_t num_blocks) {
  Buffer from(num_bytes + 16, 1, 127), to(num_bytes + 16);
  CopyPlan plan;
  const Box box{0, 0, 0, num_bytes, {}};
  plan.add(box, Direction::kToFull, from.data + (windows ? 2 : 0), to.data);
  emulated::num_streamed = 0;
  if (plan.for_each_batch(Launch{max_blocks})) fail("a launch is refused");
  cudaDeviceSynchronize();
  if (emulated_last_num_blocks() != num_blocks) fail("a grid has another size");
  const int64_t num_pieces = num_bytes / 16, num_hinted = windows ? num_pieces : 2 * num_pieces;
  const bool is_large = num_bytes >= kCacheBytes / 2;
  if (emulated::num_streamed != (is_large ? num_hinted : 0)) fail("a hint to the cache is wrong");
}

void check_launches() {
  const int64_t tile = int64_t{kTile} * 16, half = kCacheBytes / 2;
  check_launch(tile, false, 0, 1);
  check_launch(half - 16, false, 0, 24);
  check_launch(half, false, 0, 24);
  check_launch(half - 16, true, 0, 14);
  check_launch(half, true, 0, 14);
  check_launch(half, false, 3, 3);
  check_launch(2 * tile, false, 3, 2);
}

// Cuts that no plan makes, and launches and copies that CUDA refuses.
void check_refused() {
  SmallBatch batch{};
  for (const Cut& cut : {Cut{3, false}, Cut{8, true}}) {
    if (Launch{0}(batch, cut) != cudaErrorInvalidValue) fail("a cut without a kernel is launched");
  }
  if (Launch{0}(batch, {4, false}) != cudaErrorInvalidConfiguration) fail("no blocks are launched");
  Buffer device(64);
  char host[64];
  const RowCopy overlapping{device.data, host, 16, 2, 16, 8};
  const RowCopy to_device{host, device.data, 16, 1, 0, 0};
  if (flex_model_copy_rows(&overlapping, nullptr) != cudaErrorInvalidPitchValue ||
      flex_model_copy_rows(&to_device, nullptr) != cudaErrorInvalidValue) {
    fail("rows are copied that CUDA would refuse");
  }
  if (std::strcmp(flex_model_cuda_error(cudaErrorInvalidValue), "invalid argument")) {
    fail("the text of an error is wrong");
  }
}

// What the sanitizers must find.
void misalign() {
  SmallBatch batch{};
  Buffer from(64), to(64);
  batch.copies[0].from = from.data + 1;
  batch.copies[0].to = to.data;
  batch.copies[0].num_pieces = 1;
  batch.arrange(1);
  Launch{0}(batch, {16, false});
  cudaDeviceSynchronize();
}

void overlap() {
  Buffer from(1 << 12), to(1 << 12);
  CopyPlan plan;
  for (int64_t at : {0, 1024}) {
    plan.add({0, 0, at, 2048, {}}, Direction::kToFull, from.data, to.data);
  }
  plan.for_each_batch(Launch{0});
  cudaDeviceSynchronize();
}

}  // namespace

int main(int argc, char** arguments) {
  if (argc > 1) {
    std::strcmp(arguments[1], "overlap") ? misalign() : overlap();
    return 0;
  }
  for (uint32_t value = 1; value <= 300; ++value) check_divisor(value);
  for (int i = 0; i < 500; ++i) check_divisor(static_cast<uint32_t>(pick(1, int64_t{1} << 30)));
  check_divisor(1u << 30);
  for (int i = 0; i < 1000; ++i) {
    const Direction direction = i % 2 ? Direction::kToFull : Direction::kToShard;
    check_box(direction, i % 3 ? int64_t{1} << 30 : pick(3, 40));
  }
  for (int64_t boxes : {1, 2, 7, 16, 17, 240, 241, 700}) check_many_boxes(boxes, 40, 3);
  check_many_boxes(5, 700, 500);
  check_many_boxes(19, 200, 400);
  check_shifts();
  check_large();
  check_choice();
  check_launches();
  check_refused();
  return 0;
}
