#include "dlpack.h"

#include <memory>

namespace py = pybind11;

namespace flex_model {
namespace {

// The C structures of DLPack 0.x, which torch.from_dlpack reads.
// Source: the interface that dmlc.github.io/dlpack documents.
struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};
struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // null: contiguous
  uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);
};

constexpr int32_t kDLCPU = 1;

struct Lease {
  DLManagedTensor managed;
  std::vector<int64_t> sizes;
  std::shared_ptr<void> keeper;
};

// Called from whichever thread drops the tensor, with or without the GIL.
void end(DLManagedTensor* managed) { delete static_cast<Lease*>(managed->manager_ctx); }

// A capsule that was not consumed by from_dlpack still has its first name.
void drop_unused(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, "dltensor")) return;
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->deleter(managed);
}

}  // namespace

py::object lease_tensor(std::vector<int64_t> sizes, int code, int bits) {
  int64_t bytes = bits / 8;
  for (int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) {
      throw py::value_error("lease_tensor: sizes out of range");
    }
  }
  Owned memory = lease(bytes);
  if (memory.data == nullptr) return py::none();
  return as_tensor(std::move(memory), std::move(sizes), code, bits);
}

py::object as_tensor(Owned memory, std::vector<int64_t> sizes, int code, int bits) {
  auto* lease = new Lease{{}, std::move(sizes), std::move(memory.keeper)};
  lease->managed = {{memory.data,
                     {kDLCPU, 0},
                     static_cast<int32_t>(lease->sizes.size()),
                     {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1},
                     lease->sizes.data(),
                     nullptr,
                     0},
                    lease,
                    &end};
  return py::reinterpret_steal<py::object>(
      PyCapsule_New(&lease->managed, "dltensor", &drop_unused));
}

}  // namespace flex_model
