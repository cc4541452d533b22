// What torch asks of a kind of devices: memory, streams, events. In place of what libtorch_cuda
// registered.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>

namespace {

constexpr auto kCUDA = c10::DeviceType::CUDA;

c10::DeviceIndex current_device() {
  int device;
  cudaGetDevice(&device);
  return static_cast<c10::DeviceIndex>(device);
}

c10::DeviceIndex num_devices() {
  int count;
  cudaGetDeviceCount(&count);
  return static_cast<c10::DeviceIndex>(count);
}

cudaStream_t handle(const c10::Stream& stream) {
  return reinterpret_cast<cudaStream_t>(stream.id());
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  c10::Device getDevice() const override { return {kCUDA, current_device()}; }
  void setDevice(c10::Device device) const override { cudaSetDevice(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    cudaSetDevice(device.index());
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    if (!device.has_index()) device = getDevice();
    return c10::Stream(c10::Stream::UNSAFE, device,
                       reinterpret_cast<int64_t>(emulated_current_stream(device.index())));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    emulated_set_current_stream(stream.device_index(), handle(stream));
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return cudaStreamQuery(handle(stream)) == cudaSuccess;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    cudaStreamSynchronize(handle(stream));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) cudaEventCreate(reinterpret_cast<cudaEvent_t*>(event));
    cudaEventRecord(static_cast<cudaEvent_t>(*event), handle(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) cudaStreamWaitEvent(handle(stream), static_cast<cudaEvent_t>(event), 0);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || cudaEventQuery(static_cast<cudaEvent_t>(event)) == cudaSuccess;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(event));
  }
};

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = emulated::allocate(size, current_device());
    return {memory, memory, raw_deleter(), {kCUDA, current_device()}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &emulated::release; }
  void copy_data(void* to, const void* from, size_t size) const override {
    cudaDeviceSynchronize();
    std::memcpy(to, from, size);
  }
};

void free_page_locked(void* memory) {
  if (memory != nullptr) cudaHostUnregister(memory);
  std::free(memory);
}

struct PageLockedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = size ? std::aligned_alloc(4096, (size + 4095) / 4096 * 4096) : nullptr;
    if (memory != nullptr) cudaHostRegister(memory, size, cudaHostRegisterPortable);
    return {memory, memory, raw_deleter(), c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_page_locked; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices(); }
  int getNumGPUs() const override { return num_devices(); }
  c10::DeviceIndex current_device() const override { return ::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return ::current_device(); }
  bool isPinnedPtr(const void* address) const override {
    return attributes(address).type == cudaMemoryTypeHost;
  }
  c10::Device getDeviceFromPtr(void* address) const override {
    TORCH_CHECK(attributes(address).type == cudaMemoryTypeDevice, "not memory of a device");
    return {kCUDA, static_cast<c10::DeviceIndex>(attributes(address).device)};
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* one = new PageLockedMemory;
    return one;
  }

 private:
  static cudaPointerAttributes attributes(const void* address) {
    cudaPointerAttributes found;
    cudaPointerGetAttributes(&found, address);
    return found;
  }
};

// Loaded before libtorch_cuda, whose own hooks and allocator have a lower priority.
const bool registered = [] {
  c10::SetAllocator(kCUDA, new DeviceMemory, 1);
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks",
      [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> {
        return std::make_unique<Hooks>();
      },
      c10::REGISTRY_PREFERRED);
  return true;
}();

}  // namespace

// To be called after libtorch_cuda has registered its own, which has no priority.
extern "C" __attribute__((visibility("default"))) void emulated_register_guard() {
  static const c10::impl::DeviceGuardImplRegistrar guard(kCUDA, new Guard);
}

extern "C" void __gcov_dump();  // of libgcov

// For a process that ends without the functions that run at an orderly exit.
extern "C" __attribute__((visibility("default"))) void emulated_write_counts() { __gcov_dump(); }
