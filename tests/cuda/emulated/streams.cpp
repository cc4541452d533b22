// The emulated CUDA runtime: launches, streams and events. Work is done late and in random order.
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int kDevices = 3;
constexpr int kPoison = 0xa5;
constexpr size_t kMaxPitch = (size_t{1} << 31) - 1;

uint64_t random_below(uint64_t end) {
  static std::mutex mutex;
  static std::mt19937_64 bits([] {
    const char* seed = std::getenv("FLEX_MODEL_EMULATED_SEED");
    return seed ? std::strtoull(seed, nullptr, 10) : 1;
  }());
  const std::lock_guard<std::mutex> lock(mutex);
  return bits() % end;
}

std::vector<uint32_t> random_order(uint32_t count, uint32_t seed) {
  std::vector<uint32_t> order(count);
  std::minstd_rand bits(seed);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), bits);
  return order;
}

// A thread of a kernel that came to __syncthreads. It does not go on from there, which would take a
// stack of its own: once all threads of its block have come, it runs again, and past it. What is
// before __syncthreads runs twice, so a second time must do nothing new.
struct Synchronized {};

// What the parts of a grid share: by block, how many of its threads came to __syncthreads.
struct Arrivals {
  explicit Arrivals(uint32_t blocks) : num_threads(blocks) {}
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<uint32_t> num_threads;
};

// A grid as it runs, or one of several equal parts of its threads, chosen by the seed. A thread
// that sleeps may wait for another one, as the barrier does: then one more thread of the host takes
// over the rest. A few blocks run at a time, as on a GPU with other work: the next one starts once
// one has ended.
class Grid {
 public:
  Grid(uint32_t blocks, uint32_t threads, const std::function<void()>& kernel, uint32_t seed,
       Arrivals* arrivals, uint32_t part = 0, uint32_t num_parts = 1)
      : kernel_(kernel),
        arrivals_(arrivals),
        num_blocks_(blocks),
        num_threads_(threads),
        seed_(seed),
        part_(part),
        num_parts_(num_parts),
        max_running_(seed % 2 ? 1 : 4),
        blocks_(random_order(blocks, seed)) {}  // alike, as parts wait for each other

  void run() {
    work();
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      if (helpers_.empty()) return;
      std::thread helper = std::move(helpers_.back());
      helpers_.pop_back();
      lock.unlock();
      helper.join();
    }
  }

  static void sleeping() {
    if (current_ == nullptr || std::exchange(has_helper_, true)) return;
    Grid* grid = current_;
    const std::lock_guard<std::mutex> lock(grid->mutex_);
    grid->helpers_.emplace_back([grid] { grid->work(); });
  }

  static void synchronize() {
    if (!goes_past_) throw Synchronized();
  }

 private:
  struct Running {
    uint32_t num_left;  // threads that have neither ended nor come to __syncthreads
    uint32_t num_synchronized = 0;
  };

  void work() {
    current_ = this;
    gridDim.x = num_blocks_;
    blockDim.x = num_threads_;
    while (take()) {
      has_helper_ = false;
      bool is_synchronized = false;
      try {
        kernel_();
      } catch (const Synchronized&) {
        is_synchronized = true;
        const std::lock_guard<std::mutex> lock(arrivals_->mutex);
        ++arrivals_->num_threads[blockIdx.x];
        arrivals_->changed.notify_all();
      }
      leave(is_synchronized);
    }
    current_ = nullptr;
  }

  void leave(bool is_synchronized) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Running& block = running_.at(blockIdx.x);
    block.num_synchronized += is_synchronized;
    if (--block.num_left == 0 && block.num_synchronized == 0) running_.erase(blockIdx.x);
    changed_.notify_all();
  }

  // Sets the next thread to run; false if there is none.
  bool take() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (threads_.empty()) {
      if (blocks_.empty() && running_.empty()) return false;
      if (!blocks_.empty() && running_.size() < max_running_) {
        start(blocks_.back(), false);
        blocks_.pop_back();
        continue;
      }
      const auto waiting = std::find_if(running_.begin(), running_.end(), [](const auto& block) {
        return block.second.num_left == 0;
      });
      if (waiting == running_.end()) {
        changed_.wait(lock);
        continue;
      }
      const uint32_t block = waiting->first;
      std::unique_lock<std::mutex> others(arrivals_->mutex);
      arrivals_->changed.wait(others,
                              [&] { return arrivals_->num_threads[block] == num_threads_; });
      start(block, true);
    }
    blockIdx.x = block_;
    goes_past_ = are_past_;
    threadIdx.x = threads_.back();
    threads_.pop_back();
    return true;
  }

  void start(uint32_t block, bool are_past) {
    block_ = block;
    are_past_ = are_past;
    const auto all = random_order(num_threads_, seed_ + block_ * 2654435761u);
    threads_.assign(all.begin() + num_threads_ * part_ / num_parts_,
                    all.begin() + num_threads_ * (part_ + 1) / num_parts_);
    running_[block] = Running{static_cast<uint32_t>(threads_.size())};
  }

  static inline thread_local Grid* current_ = nullptr;
  static inline thread_local bool has_helper_ = false, goes_past_ = false;
  const std::function<void()>& kernel_;
  Arrivals* const arrivals_;
  const uint32_t num_blocks_, num_threads_, seed_, part_, num_parts_, max_running_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<uint32_t> blocks_, threads_;  // left; the threads of `block_`
  std::map<uint32_t, Running> running_;     // by block
  uint32_t block_ = 0;
  bool are_past_ = false;  // whether its threads go past __syncthreads
  std::vector<std::thread> helpers_;
};

void run_grid(uint32_t blocks, uint32_t threads, const std::function<void()>& kernel) {
  const auto seed = static_cast<uint32_t>(random_below(1u << 30));
  Arrivals arrivals(blocks);
#ifdef __SANITIZE_THREAD__  // two halves at once, for it to compare what they access
  Grid first(blocks, threads, kernel, seed, &arrivals, 0, 2);
  Grid second(blocks, threads, kernel, seed, &arrivals, 1, 2);
  std::thread beside([&] { first.run(); });
  second.run();
  beside.join();
#else
  Grid(blocks, threads, kernel, seed, &arrivals).run();
#endif
}

}  // namespace

// Never destroyed: its thread waits for work until the process ends.
struct CUstream_st {
  const int device;

  explicit CUstream_st(int device) : device(device) {
    std::thread([this] { work(); }).detach();
  }

  void add(std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    ++num_added_;
    changed_.notify_all();
  }
  uint64_t num_added() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return num_added_;
  }
  bool has_done(uint64_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return num_done_ >= count;
  }
  void wait(uint64_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return num_done_ >= count; });
  }

 private:
  void work() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      if (random_below(4) == 0) usleep(static_cast<useconds_t>(random_below(1000)));
      task();
      task = nullptr;  // what it holds is freed before it counts as done
      const std::lock_guard<std::mutex> lock(mutex_);
      ++num_done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  uint64_t num_added_ = 0, num_done_ = 0;
};

struct CUevent_st {
  cudaStream_t stream = nullptr;  // null: not recorded
  uint64_t count = 0;             // of the stream's tasks before it
};

namespace {

// Never destroyed: streams run until the process ends.
struct Streams {
  std::mutex mutex;
  std::vector<cudaStream_t> all;  // the default streams first
  Streams() {
    for (int device = 0; device < kDevices; ++device) all.push_back(new CUstream_st(device));
  }
};

Streams& streams() {
  static Streams* one = new Streams;
  return *one;
}

std::atomic<uint32_t> last_num_blocks = 0, num_launches = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;
thread_local cudaStream_t current_streams[kDevices] = {};

cudaStream_t or_default(cudaStream_t stream) {
  return stream ? stream : streams().all[current_device];
}

}  // namespace

namespace emulated {

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

void enqueue(cudaStream_t stream, std::function<void()> task) {
  or_default(stream)->add(std::move(task));
}

cudaError_t launch(std::function<void()> kernel, uint32_t blocks, uint32_t threads,
                   cudaStream_t stream) {
  if (blocks == 0 || blocks > 0x7fffffffu || threads == 0 || threads > 1024) {
    result(cudaErrorInvalidConfiguration);
  } else {
    last_num_blocks = blocks;
    ++num_launches;
    enqueue(stream, [=] { run_grid(blocks, threads, kernel); });
  }
  return cudaGetLastError();
}

}  // namespace emulated

extern "C" {

void __nanosleep(unsigned) {
  Grid::sleeping();
  usleep(20);
}

void __syncthreads() { Grid::synchronize(); }

void __threadfence_system() {
#ifndef __SANITIZE_THREAD__  // which knows no fences; the flags' own order is enough for it
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "part or all of the requested memory range is already mapped";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
    default: return "another error of the emulated runtime";
  }
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return emulated::result(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

// A small one, so that blocks take several tiles.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 2 : 1 << 20;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  std::vector<cudaStream_t> all;
  {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    all = streams().all;
  }
  for (cudaStream_t stream : all) {
    if (stream->device == current_device) cudaStreamSynchronize(stream);
  }
  return cudaSuccess;
}

uint32_t emulated_last_num_blocks() { return last_num_blocks; }

uint32_t emulated_num_launches() { return num_launches; }

cudaStream_t emulated_current_stream(int device) {
  return current_streams[device] ? current_streams[device] : streams().all[device];
}

void emulated_set_current_stream(int device, cudaStream_t stream) {
  current_streams[device] = stream;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  const std::lock_guard<std::mutex> lock(streams().mutex);
  streams().all.push_back(*stream = new CUstream_st(current_device));
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  stream = or_default(stream);
  return stream->has_done(stream->num_added()) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream = or_default(stream);
  stream->wait(stream->num_added());
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const CUevent_st now = *event;
  if (now.stream) emulated::enqueue(stream, [now] { now.stream->wait(now.count); });
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* data) {
  emulated::enqueue(stream, [=] { function(data); });
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->stream = or_default(stream);
  event->count = event->stream->num_added();
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const bool done = !event->stream || event->stream->has_done(event->count);
  return done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event->stream) event->stream->wait(event->count);
  return cudaSuccess;
}

}  // extern "C"
