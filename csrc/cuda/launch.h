// What CUDA code offers to the ops: C functions, so that neither side sees the other's headers.
// Each returns a cudaError_t as an int, 0 for success; `stream` is a cudaStream_t. They work on the
// current device.
#pragma once

#include "cuda/box_copy.h"
#include "cuda/peers.h"

namespace flex_model {

constexpr int64_t kIpcHandleBytes = 64;

// `num_rows` rows of `row_bytes`. The pitches, from row to row, are not below `row_bytes`; 0 of one
// row.
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

// Starts the copies of `batch`, with at most `max_blocks` blocks at once (0: as many as there are).
int flex_model_copy_small(const flex_model::SmallBatch* batch, flex_model::Cut cut,
                          uint32_t max_blocks, void* stream);
int flex_model_copy_large(const flex_model::LargeBatch* batch, flex_model::Cut cut,
                          uint32_t max_blocks, void* stream);

// Starts a copy of rows to page-locked host memory.
int flex_model_copy_rows(const flex_model::RowCopy* copy, void* stream);

// Page-locks `size` bytes of host memory for all devices, and undoes it.
int flex_model_page_lock(void* host, int64_t size);
int flex_model_page_unlock(void* host);

// Where kernels see page-locked host memory; null if `host` is not page-locked.
int flex_model_mapped_address(const void* host, void** mapped);

// Starts the meeting of all ranks (schema.cpp, meet_peers).
int flex_model_meet_peers(const flex_model::Pads* pads, uint32_t number, uint64_t timeout_ns,
                          void* failed, void* stream);

// Memory that other processes can open: zeroed; its handle of kIpcHandleBytes; its address here.
int flex_model_ipc_malloc(int64_t size, void** memory);
void flex_model_ipc_free(void* memory);
int flex_model_ipc_handle(void* memory, void* handle);
int flex_model_ipc_open(const void* handle, void** memory);
int flex_model_ipc_close(void* memory);

// What an error code means; the runtime forgets it.
const char* flex_model_cuda_error(int error);
}
