// What the kernels offer to ops.cpp: C functions, so that neither side sees the other's headers.
// Each returns a cudaError_t as an int, 0 for success; `stream` is a cudaStream_t.
#pragma once

#include "cuda/box_copy.h"

extern "C" {

// Starts the copies of `batch`, all in chunks of `chunk_bytes`.
int flex_model_copy_boxes(const flex_model::CopyBatch* batch, int chunk_bytes, void* stream);

// What an error code means.
const char* flex_model_cuda_error(int error);
}
