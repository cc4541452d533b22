// Runs the CUDA copy kernels and their index maths on the CPU, against the plain strided copy of
// boxes.h. Prints what is wrong and returns 1, or returns 0. Built and run by
// tests/cuda/test_cuda_maths.py.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "cuda_on_cpu.h"

#include "cuda/box_copy_kernels.cuh"
#include "cuda/box_copy_plan.h"

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

// Aligned loads reach up to 15 bytes beyond the bytes they are for.
constexpr int64_t kMargin = 16;

// Buffers of a case, with a margin on either side; their data is aligned as CUDA's allocations are.
struct Buffer {
  std::vector<char> bytes;
  char* data;
  int64_t size;

  explicit Buffer(int64_t size) : bytes(size + 2 * kMargin + 256, 0), size(size) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(bytes.data()) + kMargin;
    data = bytes.data() + kMargin + (256 - start % 256) % 256;
  }
  void fill() {
    for (char& byte : bytes) byte = static_cast<char>(pick(1, 127));
  }
};

Words load(const char* address) {
  if (reinterpret_cast<uintptr_t>(address) % kWindowBytes) fail("a wide load is not aligned");
  Words words;
  std::memcpy(&words, address, sizeof(words));
  return words;
}

void move_chunk(const Copy& copy, uint32_t i, int unit) {
  const char* read;
  char* write;
  copy.find_chunk(i, unit, &read, &write);
  if (reinterpret_cast<uintptr_t>(read) % unit || reinterpret_cast<uintptr_t>(write) % unit) {
    fail("a chunk is not aligned");
  }
  std::memcpy(write, read, unit);
}

void move_window(const Copy& copy, uint32_t i, int unit) {
  const Window window = copy.find_window(i);
  if (reinterpret_cast<uintptr_t>(window.to) % kWindowBytes) fail("a window is not aligned");
  const char* aligned = window.from - window.shift();
  Words low{}, high{};
  if (window.needs_low()) low = load(aligned);
  if (window.needs_high()) high = load(aligned + kWindowBytes);
  const Words words = shifted(low, high, window.shift());
  if (window.is_whole()) {
    std::memcpy(window.to, &words, kWindowBytes);
    return;
  }
  int moved = 0;
  for (int at = 0; at < kWindowBytes; at += unit) {
    if (at < window.begin || at >= window.end) continue;
    const uint32_t bits = words.word[at / 4] >> (at % 4 * 8);
    std::memcpy(window.to + at, &bits, unit);
    moved += unit;
  }
  if (window.begin < window.end && moved != window.end - window.begin) fail("a part is cut short");
}

// What a launch does: every tile of every copy once.
struct RunBatch {
  int launches = 0;

  template <typename Batch>
  int operator()(const Batch& batch, const Cut& cut) {
    ++launches;
    uint64_t pieces = 0, expected = 0;
    for (uint32_t c = 0; c < batch.num_copies.value; ++c) expected += batch.copies[c].num_pieces;
    std::vector<std::pair<uint32_t, uint32_t>> seen;
    for (uint32_t block = 0; block < batch.num_blocks; ++block) {
      uint32_t tile;
      const uint32_t c = batch.find_tile(block, &tile);
      if (c >= batch.num_copies.value) fail("a block has no copy");
      seen.emplace_back(c, tile);
      const Copy& copy = batch.copies[c];
      const uint32_t end = std::min((tile + 1) * kTile, copy.num_pieces);
      if (tile * kTile >= end) fail("a tile is empty");
      for (uint32_t i = tile * kTile; i < end; ++i, ++pieces) {
        cut.windows ? move_window(copy, i, cut.unit) : move_chunk(copy, i, cut.unit);
      }
    }
    std::sort(seen.begin(), seen.end());
    if (std::unique(seen.begin(), seen.end()) != seen.end()) fail("two blocks make one tile");
    if (pieces != expected) fail("pieces are left out");
    return 0;
  }
};

// The kernels themselves, with any number of blocks.
struct RunKernel {
  static inline std::set<int> cuts_seen;

  template <typename Batch>
  int operator()(const Batch& batch, const Cut& cut) {
    const uint32_t blocks = static_cast<uint32_t>(pick(1, batch.num_blocks + 1));
    const auto run = [&](auto kernel) { launch_on_cpu(kernel, blocks, kThreads, batch); };
    const int kind = cut.windows ? -cut.unit : cut.unit;
    cuts_seen.insert(kind);
    switch (kind) {
      case -4: run(copy_windows<uint32_t, Batch>); break;
      case -2: run(copy_windows<uint16_t, Batch>); break;
      case -1: run(copy_windows<uint8_t, Batch>); break;
      case 16: run(copy_chunks<uint4, Batch>); break;
      case 8: run(copy_chunks<uint2, Batch>); break;
      case 4: run(copy_chunks<uint32_t, Batch>); break;
      case 2: run(copy_chunks<uint16_t, Batch>); break;
      case 1: run(copy_chunks<uint8_t, Batch>); break;
      default: fail("a cut that no kernel makes");
    }
    return 0;
  }
};

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

void check_box(Direction direction, int64_t max_pieces) {
  const Box box = random_box();
  const bool to_full = direction == Direction::kToFull;
  const int64_t shift = pick(0, 1) * pick(0, 15);  // of the shard in its buffer
  const int64_t to_shift = pick(0, 1) * pick(0, 15);
  Buffer from(end_of(box, !to_full) + shift), to(end_of(box, to_full) + to_shift);
  from.fill();
  Buffer expected(to.size);
  if (to_full) {
    assemble_box(box, from.data + shift, expected.data + to_shift);
  } else {
    split_box(box, from.data + shift, expected.data + to_shift);
  }
  const auto check = [&](const char* what) {  // the margins, too
    if (std::memcmp(to.data - kMargin, expected.data - kMargin, to.size + 2 * kMargin)) fail(what);
    std::fill(to.bytes.begin(), to.bytes.end(), 0);
  };

  const Transfer transfer = transfer_of(box, direction, from.data + shift, to.data + to_shift);
  const int chunk_bytes = chunk_bytes_of(transfer);
  for (const Cut& cut : {Cut{chunk_bytes, false}, Cut{std::min(chunk_bytes, 4), true}}) {
    std::vector<Copy> copies;
    append_copies(transfer, cut, max_pieces, &copies);
    for (const Copy& copy : copies) {
      if (copy.num_pieces < 1 || copy.num_pieces > max_pieces) {
        fail("a copy has more pieces than allowed");
      }
      SmallBatch batch;
      batch.copies[0] = copy;
      batch.arrange(1);
      RunBatch()(batch, cut);
    }
    check(cut.windows ? "a copy by windows differs from the plain one"
                      : "a copy by chunks differs from the plain one");
  }
  CopyPlan plan;
  plan.add(box, direction, from.data + shift, to.data + to_shift);
  plan.for_each_batch(RunBatch());
  check("a plan differs from the plain copy");
  plan.for_each_batch(RunKernel());
  check("a kernel differs from the plain copy");
}

// Boxes of all widths at once: one launch if it is little, several if it is much.
void check_many_boxes(int64_t num_boxes, int64_t run_bytes, int64_t rows) {
  const int64_t width = run_bytes + 3;
  Buffer from(num_boxes * width * rows), to(num_boxes * width * rows);
  Buffer expected(to.size);
  from.fill();
  CopyPlan plan;
  for (int64_t i = 0; i < num_boxes; ++i) {
    const int64_t bytes = pick(1, run_bytes), at = i * width;
    const Box box{0, at, at + pick(0, 3), bytes, {{rows, num_boxes * width, num_boxes * width}}};
    plan.add(box, Direction::kToFull, from.data, to.data);
    assemble_box(box, from.data, expected.data);
  }
  RunBatch run;
  plan.for_each_batch([&](const auto& batch, const Cut& cut) { return run(batch, cut); });
  if (std::memcmp(to.data, expected.data, to.size)) fail("many boxes differ from the plain copies");
  std::fill(to.bytes.begin(), to.bytes.end(), 0);
  plan.for_each_batch(RunKernel());
  if (std::memcmp(to.data, expected.data, to.size)) fail("kernels differ from the plain copies");
  const int64_t few = (num_boxes + 239) / 240;
  if (to.size < (1 << 20) && run.launches != few) fail("little work takes more launches than one");
  if (run.launches > few + 7) fail("too many launches");
  if (plan.for_each_batch([](const auto&, const Cut&) { return 7; }) != 7) fail("an error is lost");
}

// Every way that two sides can be aligned.
void check_shifts() {
  Buffer from(300), to(300);
  from.fill();
  for (int64_t source = 0; source < 16; ++source) {
    for (int64_t target = 0; target < 16; ++target) {
      for (int64_t bytes : {1, 15, 16, 17, 31, 32, 33, 64, 100}) {
        const Box box{0, target, source, bytes, {}};
        std::vector<Copy> copies;
        append_copies(transfer_of(box, Direction::kToFull, from.data, to.data), {1, true}, 1 << 20,
                      &copies);
        SmallBatch batch;
        batch.copies[0] = copies.at(0);
        batch.arrange(1);
        std::fill(to.bytes.begin(), to.bytes.end(), 0);
        RunBatch()(batch, {1, true});
        if (std::memcmp(to.data + target, from.data + source, bytes)) fail("a shift is wrong");
        if (std::count(to.bytes.begin(), to.bytes.end(), 0) !=
            static_cast<int64_t>(to.bytes.size()) - bytes) {
          fail("a shifted copy writes beside its target");
        }
      }
    }
  }
}

// Addresses beyond 4 GiB, which are computed and not touched.
void check_large() {
  const char* from = reinterpret_cast<const char*>(uintptr_t{1} << 40);
  char* to = reinterpret_cast<char*>(uintptr_t{1} << 41);
  for (const Cut& cut : {Cut{16, false}, Cut{2, true}}) {
    const int64_t bytes = int64_t{40} << 30;
    const Transfer run{from, to, bytes, {}};
    const Transfer rows{from, to, int64_t{10} << 30, {{4, int64_t{10} << 30, int64_t{11} << 30}}};
    for (const Transfer& transfer : {run, rows}) {
      std::vector<Copy> copies;
      append_copies(transfer, cut, int64_t{1} << 30, &copies);
      int64_t covered = 0;
      for (const Copy& copy : copies) {
        covered += copy.run_bytes * (copy.num_levels ? copy.num_pieces / copy.run.value : 1);
        const char* read;
        char* write;
        const uint32_t last = copy.num_pieces - 1 - (cut.windows ? 1 : 0);
        if (cut.windows) {
          const Window window = copy.find_window(last);
          read = window.from, write = window.to;
        } else {
          copy.find_chunk(last, cut.unit, &read, &write);
        }
        const int64_t end = copy.num_levels == 0 ? copy.run_bytes : transfer.run_bytes;
        if (copy.num_levels == 0 && (read != copy.from + end - 16 || write != copy.to + end - 16)) {
          fail("a large copy ends elsewhere");
        }
      }
      if (covered != bytes) fail("a large copy is not covered");
    }
  }
}

}  // namespace

int main() {
  for (uint32_t value = 1; value <= 300; ++value) check_divisor(value);
  for (int i = 0; i < 2000; ++i) check_divisor(static_cast<uint32_t>(pick(1, int64_t{1} << 30)));
  check_divisor(1u << 30);
  for (int i = 0; i < 3000; ++i) {
    const Direction direction = i % 2 ? Direction::kToFull : Direction::kToShard;
    check_box(direction, i % 3 ? int64_t{1} << 30 : pick(3, 40));
  }
  for (int64_t boxes : {1, 2, 7, 16, 17, 240, 241, 700}) check_many_boxes(boxes, 40, 3);
  check_many_boxes(5, 700, 500);
  check_many_boxes(19, 200, 400);
  check_shifts();
  check_large();
  if (RunKernel::cuts_seen.size() != 8) fail("some kernel was not run");
  return 0;
}
