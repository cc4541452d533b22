// The emulated CUDA runtime: memory and copies. What CUDA would refuse is refused, and memory holds
// nonsense until something is written to it.
#include <cuda_runtime.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

using emulated::result;

namespace {

constexpr int kPoison = 0xa5;
constexpr size_t kMaxPitch = (size_t{1} << 31) - 1;

struct Memory {
  size_t size;
  int device = 0;
  int file = -1;                       // of cudaMalloc
  cudaStream_t stream = nullptr;       // of torch's memory
  std::set<cudaStream_t> others = {};  // which use it too
};
using Memories = std::map<char*, Memory>;

// Memory of torch's that was released while other streams may use it.
struct InUse {
  char* memory;
  Memory ended;
  std::vector<cudaEvent_t> until;
};

// Never destroyed: streams use it until the process ends.
struct Known {
  std::mutex mutex;
  Memories on_device, opened, page_locked;
  std::multimap<std::pair<cudaStream_t, size_t>, char*> free;  // torch's
  std::vector<InUse> in_use;
};

Known& known() {
  static Known* one = new Known;
  return *one;
}

// The memory that holds all `size` bytes at `address`; null if none does.
const Memories::value_type* holder(const Memories& memories, const void* address, size_t size) {
  char* begin = static_cast<char*>(const_cast<void*>(address));
  auto next = memories.upper_bound(begin);
  if (next == memories.begin()) return nullptr;
  --next;
  return begin + size <= next->first + next->second.size ? &*next : nullptr;
}

bool is_on_device(const void* address, size_t size) {
  const std::lock_guard<std::mutex> lock(known().mutex);
  return holder(known().on_device, address, size) || holder(known().opened, address, size);
}

bool is_page_locked(const void* address, size_t size) {
  const std::lock_guard<std::mutex> lock(known().mutex);
  return holder(known().page_locked, address, size);
}

cudaError_t copy_rows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                      size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  if (width == 0 || height == 0) return cudaSuccess;
  const size_t to_bytes = to_pitch * (height - 1) + width;
  if (kind != cudaMemcpyDeviceToHost || !is_on_device(from, from_pitch * (height - 1) + width) ||
      is_on_device(to, to_bytes)) {
    return result(cudaErrorInvalidValue);
  }
  const bool was_locked = is_page_locked(to, to_bytes);
  emulated::enqueue(stream, [=] {
    if (was_locked && !is_page_locked(to, to_bytes)) {  // what CUDA does then is not documented
      std::fprintf(stderr, "emulated GPU: a copy to memory that is not page-locked any more\n");
      std::abort();
    }
    for (size_t row = 0; row < height; ++row) {
      std::memcpy(static_cast<char*>(to) + row * to_pitch,
                  static_cast<const char*>(from) + row * from_pitch, width);
    }
  });
  return cudaSuccess;
}

void* map_file(int file, size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

void unmap(Memories& memories, Memories::iterator memory) {
  munmap(memory->first, memory->second.size);
  if (memory->second.file >= 0) close(memory->second.file);
  memories.erase(memory);
}

void make_free(char* memory, const Memory& ended) {
  emulated::enqueue(ended.stream, [=] { std::memset(memory, kPoison, ended.size); });
  known().free.emplace(std::pair(ended.stream, ended.size), memory);
}

bool have_happened(const std::vector<cudaEvent_t>& events) {
  return std::all_of(events.begin(), events.end(),
                     [](cudaEvent_t event) { return cudaEventQuery(event) == cudaSuccess; });
}

}  // namespace

namespace emulated {

// The smallest free memory that fits: what the stream released is used again at once.
void* allocate(size_t size, int device) {
  if (size == 0) return nullptr;
  size = (size + 511) / 512 * 512;
  Known& all = known();
  cudaStream_t stream = emulated_current_stream(device);
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto still = std::partition(all.in_use.begin(), all.in_use.end(),
                                    [](const InUse& each) { return !have_happened(each.until); });
  for (auto each = still; each != all.in_use.end(); ++each) {
    make_free(each->memory, each->ended);
    for (cudaEvent_t event : each->until) cudaEventDestroy(event);
  }
  all.in_use.erase(still, all.in_use.end());
  auto found = all.free.lower_bound({stream, size});
  char* memory = nullptr;
  if (found != all.free.end() && found->first.first == stream && found->first.second <= 2 * size) {
    memory = found->second;
    size = found->first.second;
    all.free.erase(found);
  } else {
    memory = static_cast<char*>(std::aligned_alloc(512, size));
    std::memset(memory, kPoison, size);
  }
  all.on_device[memory] = {size, device, -1, stream};
  return memory;
}

void release(void* memory) {
  Known& all = known();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.on_device.find(static_cast<char*>(memory));
  const Memory ended = found->second;
  all.on_device.erase(found);
  if (ended.others.empty()) return make_free(static_cast<char*>(memory), ended);
  InUse in_use{static_cast<char*>(memory), ended, {}};
  for (cudaStream_t stream : ended.others) {
    cudaEventCreate(&in_use.until.emplace_back());
    cudaEventRecord(in_use.until.back(), stream);
  }
  all.in_use.push_back(in_use);
}

}  // namespace emulated

extern "C" {

void emulated_record_stream(void* memory, cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(known().mutex);
  const auto found = known().on_device.find(static_cast<char*>(memory));
  if (found != known().on_device.end() && found->second.stream != stream) {
    found->second.others.insert(stream);
  }
}

cudaError_t cudaMalloc(void** memory, size_t size) {
  const int file = memfd_create("emulated GPU memory", MFD_CLOEXEC);
  if (file < 0) return result(cudaErrorMemoryAllocation);
  *memory = ftruncate(file, static_cast<off_t>(size)) == 0 ? map_file(file, size) : nullptr;
  if (*memory == nullptr) {
    close(file);
    return result(cudaErrorMemoryAllocation);
  }
  std::memset(*memory, kPoison, size);
  int device;
  cudaGetDevice(&device);
  const std::lock_guard<std::mutex> lock(known().mutex);
  known().on_device[static_cast<char*>(*memory)] = {size, device, file};
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  cudaDeviceSynchronize();
  const std::lock_guard<std::mutex> lock(known().mutex);
  const auto found = known().on_device.find(static_cast<char*>(memory));
  if (found == known().on_device.end()) return result(cudaErrorInvalidValue);
  unmap(known().on_device, found);
  return cudaSuccess;
}

cudaError_t cudaMemset(void* memory, int value, size_t size) {
  if (!is_on_device(memory, size)) return result(cudaErrorInvalidValue);
  emulated::enqueue(nullptr, [=] { std::memset(memory, value, size); });
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return copy_rows(to, size, from, size, size, 1, kind, stream);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  if (width > std::min(to_pitch, from_pitch) || std::max(to_pitch, from_pitch) > kMaxPitch) {
    return result(cudaErrorInvalidPitchValue);
  }
  return copy_rows(to, to_pitch, from, from_pitch, width, height, kind, stream);
}

cudaError_t cudaHostRegister(void* host, size_t size, unsigned) {
  if (host == nullptr || size == 0) return result(cudaErrorInvalidValue);
  const std::lock_guard<std::mutex> lock(known().mutex);
  Memories& locked = known().page_locked;
  char* begin = static_cast<char*>(host);
  const auto next = locked.upper_bound(begin);
  if (holder(locked, host, 1) || (next != locked.end() && next->first < begin + size)) {
    return result(cudaErrorHostMemoryAlreadyRegistered);
  }
  locked[begin] = {size};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* host) {
  const std::lock_guard<std::mutex> lock(known().mutex);
  const bool was_locked = known().page_locked.erase(static_cast<char*>(host));
  return was_locked ? cudaSuccess : result(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  const std::lock_guard<std::mutex> lock(known().mutex);
  void* pointer = const_cast<void*>(address);
  if (const auto* memory = holder(known().on_device, address, 1)) {
    *attributes = {cudaMemoryTypeDevice, memory->second.device, pointer, nullptr};
  } else if (holder(known().page_locked, address, 1)) {
    *attributes = {cudaMemoryTypeHost, 0, pointer, pointer};
  } else {
    *attributes = {cudaMemoryTypeUnregistered, -1, nullptr, pointer};
  }
  return cudaSuccess;
}

// The handle is the process, its file and the size.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  const std::lock_guard<std::mutex> lock(known().mutex);
  const auto found = known().on_device.find(static_cast<char*>(memory));
  if (found == known().on_device.end() || found->second.file < 0) {
    return result(cudaErrorInvalidValue);
  }
  const long words[] = {getpid(), found->second.file, static_cast<long>(found->second.size)};
  *handle = {};
  std::memcpy(handle, words, sizeof(words));
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned) {
  long words[3];
  std::memcpy(words, &handle, sizeof(words));
  if (words[0] == getpid()) return result(cudaErrorInvalidContext);  // as CUDA does
  const std::string path = "/proc/" + std::to_string(words[0]) + "/fd/" + std::to_string(words[1]);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return result(cudaErrorMapBufferObjectFailed);
  const size_t size = static_cast<size_t>(words[2]);
  *memory = map_file(file, size);
  close(file);
  if (*memory == nullptr) return result(cudaErrorMapBufferObjectFailed);
  const std::lock_guard<std::mutex> lock(known().mutex);
  known().opened[static_cast<char*>(*memory)] = {size};
  return cudaSuccess;
}

// Waits for nothing: CUDA does not promise that it would.
cudaError_t cudaIpcCloseMemHandle(void* memory) {
  const std::lock_guard<std::mutex> lock(known().mutex);
  const auto found = known().opened.find(static_cast<char*>(memory));
  if (found == known().opened.end()) return result(cudaErrorInvalidValue);
  unmap(known().opened, found);
  return cudaSuccess;
}

}  // extern "C"
