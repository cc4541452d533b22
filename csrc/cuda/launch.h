// The C functions of the CUDA code for the ops, so that neither side includes the other's headers.
// Each returns a cudaError_t as an int, 0 for success; `stream` is a cudaStream_t. They work on the
// current device.
#pragma once

#include "cuda/box_copy_batch.h"
#include "cuda/peers.h"

namespace flex_model {

constexpr int64_t kIpcHandleBytes = 64;

// A copy of `num_rows` rows of `row_bytes`. The pitches (from row to row) are at least `row_bytes`,
// or 0 for one row.
struct RowCopy {
  const char* from;
  char* to;
  int64_t row_bytes;
  int64_t num_rows;
  int64_t from_pitch;
  int64_t to_pitch;
};

}  // namespace flex_model

extern "C" {

// Starts the copies of `batch`, after the barrier unless it is null, with at most `max_blocks`
// blocks (0: as many as the device runs at once).
int flex_model_copy_small(const flex_model::SmallBatch* batch, flex_model::Cut cut,
                          uint32_t max_blocks, const flex_model::Barrier* barrier, void* stream);
int flex_model_copy_large(const flex_model::LargeBatch* batch, flex_model::Cut cut,
                          uint32_t max_blocks, const flex_model::Barrier* barrier, void* stream);

// Starts a copy of rows to page-locked host memory.
int flex_model_copy_rows(const flex_model::RowCopy* copy, void* stream);

// Page-locks `size` bytes of host memory for all devices, and unlocks them.
int flex_model_page_lock(void* host, int64_t size);
int flex_model_page_unlock(void* host);

// Sets the device address of page-locked host memory; null if `host` is not page-locked.
int flex_model_mapped_address(const void* host, void** mapped);

// Starts the barrier of all ranks (schema.cpp, peer_barrier).
int flex_model_peer_barrier(const flex_model::Barrier* barrier, void* stream);

// Zeroed memory that other processes can open, its handle of kIpcHandleBytes, and its address here.
int flex_model_ipc_malloc(int64_t size, void** memory);
void flex_model_ipc_free(void* memory);
int flex_model_ipc_handle(void* memory, void* handle);
int flex_model_ipc_open(const void* handle, void** memory);
int flex_model_ipc_close(void* memory);

// Returns the text of an error code, and clears the runtime's last error.
const char* flex_model_cuda_error(int error);
}
