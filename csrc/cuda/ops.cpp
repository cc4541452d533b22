// The ops on CUDA, with the checks and allocations of the CPU ops (csrc/ops); moments
// is CPU only (schema.cpp).
#include <torch/csrc/stable/library.h>

#include "cuda/device.h"
#include "ops/addresses.h"
#include "ops/many_tensors.h"
#include "ops/reorder.h"

namespace flex_model {
namespace {

void peer_barrier(const Tensor& buffer, const Ints& barrier) {
  const char* op = "peer_barrier";
  Cuda device(op, buffer.get_device());
  device.pass(barrier_of(op, barrier));
}

void page_lock(const Tensor& like, int64_t address, int64_t size) {
  const char* op = "page_lock";
  check(address != 0 && size > 0, op, ": `address` must not be 0, and `size` be positive, got ",
        size);
  Cuda device(op, like.get_device());
  const int error = flex_model_page_lock(at_address(address), size);
  check(error == 0, op, ": ", size,
        " bytes of host memory can't be page-locked: ", error ? flex_model_cuda_error(error) : "",
        "; is the limit on locked memory (ulimit -l) too low?");
}

void page_unlock(const Tensor& like, int64_t address) {
  const char* op = "page_unlock";
  Cuda device(op, like.get_device());
  const int error = flex_model_page_unlock(at_address(address));
  check(error == 0, op, ": the host memory at ", static_cast<const void*>(at_address(address)),
        " can't be unlocked: ", error ? flex_model_cuda_error(error) : "");
}

Tensor ipc_buffer(const Tensor& like, int64_t size) {
  const char* op = "ipc_buffer";
  check(size > 0, op, ": `size` must be a positive number of bytes, got ", size);
  Cuda device(op, like.get_device());
  void* memory = nullptr;
  device.check_started(flex_model_ipc_malloc(size, &memory));
  const Ints sizes{size}, strides{1};
  return torch::stable::from_blob(memory, sizes, strides, like.device(), ScalarType::Byte,
                                  [](void* ended) { flex_model_ipc_free(ended); });
}

Tensor ipc_handle(const Tensor& buffer) {
  const char* op = "ipc_handle";
  check_buffer(op, "buffer", buffer);
  Cuda device(op, buffer.get_device());
  unsigned char handle[kIpcHandleBytes];
  device.check_started(flex_model_ipc_handle(buffer.mutable_data_ptr(), handle));
  const Ints sizes{kIpcHandleBytes}, strides{1};
  Tensor result = torch::stable::from_blob(
      new unsigned char[kIpcHandleBytes], sizes, strides,
      torch::stable::Device(torch::headeronly::DeviceType::CPU), ScalarType::Byte,
      [](void* ended) { delete[] static_cast<unsigned char*>(ended); });
  std::copy_n(handle, kIpcHandleBytes, static_cast<unsigned char*>(result.mutable_data_ptr()));
  return result;
}

int64_t ipc_open(const Tensor& like, const Ints& handle) {
  const char* op = "ipc_open";
  check(handle.size() == kIpcHandleBytes, op, ": `handle` must have ", kIpcHandleBytes,
        " bytes, got ", handle.size());
  unsigned char bytes[kIpcHandleBytes];
  std::copy(handle.begin(), handle.end(), bytes);
  Cuda device(op, like.get_device());
  void* memory = nullptr;
  device.check_started(flex_model_ipc_open(bytes, &memory));
  return reinterpret_cast<int64_t>(memory);
}

void ipc_close(const Tensor& like, int64_t address) {
  Cuda device("ipc_close", like.get_device());
  device.check_started(flex_model_ipc_close(reinterpret_cast<void*>(address)));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flex_model, CUDA, m) {
  m.impl("assemble", TORCH_BOX(&assemble<Cuda>));
  m.impl("split", TORCH_BOX(&split<Cuda>));
  m.impl("pack", TORCH_BOX(&pack<Cuda>));
  m.impl("pack_tensors", TORCH_BOX(&pack_tensors<Cuda>));
  m.impl("assemble_tensors", TORCH_BOX(&assemble_tensors<Cuda>));
  m.impl("pull_", TORCH_BOX(&pull_<Cuda>));
  m.impl("push", TORCH_BOX(&push<Cuda>));
  m.impl("copy_to_host", TORCH_BOX(&copy_to_host<Cuda>));
  m.impl("page_lock", TORCH_BOX(&page_lock));
  m.impl("page_unlock", TORCH_BOX(&page_unlock));
  m.impl("peer_barrier", TORCH_BOX(&peer_barrier));
  m.impl("ipc_buffer", TORCH_BOX(&ipc_buffer));
  m.impl("ipc_handle", TORCH_BOX(&ipc_handle));
  m.impl("ipc_open", TORCH_BOX(&ipc_open));
  m.impl("ipc_close", TORCH_BOX(&ipc_close));
}

}  // namespace flex_model
