// The schemas of all tensor ops of flex_model. Bytes are only moved, so any dtype works.
//
//   full      the unsharded tensor, contiguous
//   gathered  1-D uint8: the shards of all ranks in one buffer, rank r's at byte offsets[r]; -1
//             where a rank is absent, which is an error if the plan needs it
//   plan      a GatherPlan's `code`: which bytes of which shard go where (boxes/boxes.h)
//   sizes     of the result
//   barrier   of the ranks' GPUs: this rank, the number of its arrivals, a timeout in ms, a state,
//             and each rank's signal pad. A pad is the address of one uint32 per rank, zero at
//             first. The state is the address of two int32 in page-locked host memory. After the
//             timeout, or when one of them is not 0, the barrier ends and writes 1 + a missing
//             rank to the first; the second is the host's, to end it
//   address   of memory that no tensor of this process owns: a peer's, or shared by the ranks of a
//             host. It can't be checked, so the caller must ensure that the memory is valid
//
// Ops without addresses are functional: they allocate their results, on the device of their input.
// Inputs that are not contiguous are an error, because a silent copy would cost as much as the op
// itself. CPU kernels are in this folder, CUDA kernels in csrc/cuda, fake kernels in
// flex_model/_ops_fake.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(flex_model, m) {
  // Assembles the full tensor from the shards of all ranks.
  m.def(
      "assemble(Tensor gathered, int[] offsets, int[] plan, int[] sizes, ScalarType dtype) -> "
      "Tensor");
  // Extracts one rank's shard from the full tensor.
  m.def("split(Tensor full, int[] plan, int rank, int[] sizes) -> Tensor");
  // Packs all ranks' shards into one buffer of `total` bytes, the inverse of assemble; bytes
  // outside of shards are zero.
  m.def("pack(Tensor full, int[] plan, int[] offsets, int total) -> Tensor");
  // Returns three float64: the sum of the elements of a contiguous tensor of float32, float64 or
  // bfloat16, that of their squares, and the largest magnitude, which is NaN if an element is. CPU
  // only: on a GPU, torch's own reductions read at the speed of its memory.
  m.def("moments(Tensor tensor) -> Tensor");

  // ---- several tensors in one buffer, for one collective ----

  // Packs the bytes of each tensor, in its own order, at its offset into one uint8 buffer of
  // `total` bytes; the rest is zero. Tensors may be strided.
  m.def("pack_tensors(Tensor[] tensors, int[] offsets, int total) -> Tensor");
  // Assembles full tensors from one buffer with all their shards. By tensor, one after the other:
  // `offsets` has those of its ranks, `plans` its plan's length and code, `sizes` its number of
  // dims and sizes, `like` a tensor of its dtype.
  m.def(
      "assemble_tensors(Tensor gathered, int[] offsets, int[] plans, int[] sizes, Tensor[] like) "
      "-> Tensor[]");

  // ---- memory owned by other processes ----

  // Writes `full` from the shards at addresses[rank], after the barrier if there is one; peers are
  // read from rank `first` on, so that not all ranks read from the same peer first.
  m.def("pull_(Tensor(a!) full, int[] addresses, int[] plan, int first, int[] barrier=[]) -> ()");
  // Writes each rank's shard of `full` to addresses[rank]; a rank with address 0 is skipped.
  m.def("push(Tensor full, int[] addresses, int[] plan, int first) -> ()");
  // Writes one rank's shard into the full tensor at `address`, in host memory (page-locked, for a
  // shard on a GPU), on the current stream. `how`: "copy engine", "kernel" or "auto".
  m.def("copy_to_host(Tensor shard, int address, int[] plan, int rank, str how) -> ()");

  // Page-locks host memory of this process, so that every GPU can write to it, and unlocks it. CUDA
  // only; `like` selects the device.
  m.def("page_lock(Tensor like, int address, int size) -> ()");
  m.def("page_unlock(Tensor like, int address) -> ()");

  // ---- peers of a CUDA device; CUDA only ----

  // A barrier on the current stream: signals all ranks that this one arrived, and waits until all
  // have, so that each sees what the others' streams did before. `buffer` selects the device.
  m.def("peer_barrier(Tensor buffer, int[] barrier) -> ()");
  // Makes a zeroed uint8 buffer, on the device of `like`, that other processes can open; returns
  // its handle (uint8 on the CPU); maps another process's buffer and returns its address here;
  // unmaps it.
  m.def("ipc_buffer(Tensor like, int size) -> Tensor");
  m.def("ipc_handle(Tensor buffer) -> Tensor");
  m.def("ipc_open(Tensor like, int[] handle) -> int");
  m.def("ipc_close(Tensor like, int address) -> ()");
}
