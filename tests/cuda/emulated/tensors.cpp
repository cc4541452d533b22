// Tensors of device type CUDA whose memory is the process's; torch_device.py has torch's operators.
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <vector>

namespace {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Ints = std::vector<int64_t>;

Ints ints(torch::headeronly::IntHeaderOnlyArrayRef numbers) {
  return {numbers.begin(), numbers.end()};
}

size_t num_bytes(const Ints& sizes, const Ints& strides, size_t item_bytes) {
  int64_t last = 0;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] == 0) return 0;
    last += (sizes[dim] - 1) * strides[dim];
  }
  return (last + 1) * item_bytes;
}

Tensor empty(const Ints& sizes, const Ints& strides, int64_t item_bytes, ScalarType dtype,
             int64_t device) {
  const auto index = static_cast<int32_t>(device);
  void* memory = emulated::allocate(num_bytes(sizes, strides, item_bytes), index);
  return torch::stable::from_blob(memory, sizes, strides, {DeviceType::CUDA, index}, dtype,
                                  [](void* ended) {
                                    if (ended != nullptr) emulated::release(ended);
                                  });
}

// A tensor of the CPU in the memory of a tensor of a device, which must outlive it.
Tensor host(const Tensor& tensor) {
  return torch::stable::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
                                  torch::stable::Device(DeviceType::CPU), tensor.scalar_type());
}

void copy_dims(char* to, const char* from, const Ints& sizes, const Ints& to_strides,
               const Ints& from_strides, size_t dim, size_t item_bytes) {
  if (dim == sizes.size()) {
    std::memcpy(to, from, item_bytes);
    return;
  }
  for (int64_t i = 0; i < sizes[dim]; ++i) {
    copy_dims(to + i * to_strides[dim] * item_bytes, from + i * from_strides[dim] * item_bytes,
              sizes, to_strides, from_strides, dim + 1, item_bytes);
  }
}

// Copies between tensors of the CPU and of `host`, of one shape and dtype, in the order of the
// device's current stream; keeps those of the CPU until it is done.
void copy(const Tensor& to, const Tensor& from, int64_t item_bytes, int64_t device) {
  const Ints sizes = ints(to.sizes()), to_strides = ints(to.strides());
  const Ints from_strides = ints(from.strides());
  emulated::enqueue(emulated_current_stream(static_cast<int>(device)), [=] {
    auto* target = static_cast<char*>(to.mutable_data_ptr());
    const auto* source = static_cast<const char*>(from.const_data_ptr());
    const bool is_flat = to.is_contiguous() && from.is_contiguous();
    if (!is_flat) {
      copy_dims(target, source, sizes, to_strides, from_strides, 0, item_bytes);
    } else if (to.numel() > 0) {
      std::memcpy(target, source, to.numel() * item_bytes);
    }
  });
}

}  // namespace

// In place of libtorch_cuda's.
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = emulated_current_stream(device);
  return 0;
}

STABLE_TORCH_LIBRARY(emulated, m) {
  m.def(
      "empty(int[] sizes, int[] strides, int item_bytes, ScalarType dtype, int device) -> Tensor");
  m.def("host(Tensor tensor) -> Tensor");
  m.def("copy(Tensor to, Tensor source, int item_bytes, int device) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(emulated, CompositeExplicitAutograd, m) {
  m.impl("empty", TORCH_BOX(&empty));
  m.impl("host", TORCH_BOX(&host));
  m.impl("copy", TORCH_BOX(&copy));
}
