// Every tensor op of flex_model, on one page. Bytes are only moved, so any dtype goes.
//
//   full      the unsharded tensor, contiguous
//   gathered  1-D uint8: the shards of all ranks in one buffer, rank r's at byte offsets[r]; -1
//   where
//             a rank is absent, which is an error if the plan needs it
//   plan      a GatherPlan's `code`: which bytes of which shard go where (boxes/boxes.h)
//   sizes     of the result
//
// All are functional: they allocate what they return, on the device of their input. Inputs must be
// contiguous: an error says so, because a silent copy would cost as much as the op itself. CPU
// kernels are beside this file, CUDA kernels in csrc/cuda, fake kernels in flex_model/_ops_fake.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(flex_model, m) {
  // The full tensor out of the shards of all ranks.
  m.def(
      "assemble(Tensor gathered, int[] offsets, int[] plan, int[] sizes, ScalarType dtype) -> "
      "Tensor");
  // One rank's shard out of the full tensor.
  m.def("split(Tensor full, int[] plan, int rank, int[] sizes) -> Tensor");
  // All ranks' shards in one buffer of `total` bytes, the inverse of assemble; what is no shard's
  // is zero.
  m.def("pack(Tensor full, int[] plan, int[] offsets, int total) -> Tensor");
  // Two int64 on the CPU: a 64-bit hash of the tensor's bytes in order, and 1 if all its elements
  // have the same bits (or it has none) else 0. CPU only: the hash is made to be exchanged, so it
  // is needed on the host at once, and tensors that are not there are copied first.
  m.def("fingerprint(Tensor tensor) -> Tensor");
}
