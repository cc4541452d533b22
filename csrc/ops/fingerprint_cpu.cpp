// A 64-bit hash of a tensor's bytes, and whether all its elements are the same. Contract:
// schema.cpp.
//
// The hash folds 16 bytes by one 64 x 64 -> 128 bit product, as wyhash does, in four independent
// chains so that the multiplier never stalls. It depends on every bit and on the order. It is not
// cryptographic, and it differs between machines of different byte order.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "ops/check.h"

namespace flex_model {
namespace {

// The fractional digits of pi: bits without a pattern. The two factors of a product must not start
// from the same key, or swapped words could give the same product.
constexpr uint64_t kKeys[4] = {0x243f6a8885a308d3, 0x13198a2e03707345, 0xa4093822299f31d1,
                               0x082efa98ec4e6c89};
constexpr uint64_t kStarts[4] = {0x452821e638d01377, 0xbe5466cf34e90c6d, 0xc0ac29b7c97c50dd,
                                 0x3f84d5b5b5470917};

uint64_t load(const unsigned char* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

uint64_t fold(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t hash_bytes(const unsigned char* bytes, int64_t size) {
  constexpr int64_t kBlock = 64;
  uint64_t chain[4] = {kStarts[0], kStarts[1], kStarts[2], kStarts[3]};
  const auto absorb = [&chain](const unsigned char* block) {
    for (int lane = 0; lane < 4; ++lane) {
      const uint64_t first = load(block + 16 * lane), second = load(block + 16 * lane + 8);
      chain[lane] = fold(first ^ kKeys[lane], second ^ chain[lane]);
    }
  };
  int64_t at = 0;
  for (; at + kBlock <= size; at += kBlock) absorb(bytes + at);
  if (at < size) {
    unsigned char tail[kBlock] = {};
    std::memcpy(tail, bytes + at, size - at);
    absorb(tail);
  }
  uint64_t hash =
      fold(static_cast<uint64_t>(size) ^ kKeys[0], kStarts[3]);  // so that trailing zeros count
  for (int lane = 0; lane < 4; ++lane) hash = fold(hash ^ kStarts[lane], chain[lane] ^ kKeys[lane]);
  return fold(hash ^ kKeys[1], kStarts[2]);
}

// All elements are equal if each equals the next: the bytes shifted by one element are equal to the
// bytes.
bool is_constant(const unsigned char* bytes, int64_t size, int64_t element_bytes) {
  return size <= element_bytes ||
         std::memcmp(bytes, bytes + element_bytes, size - element_bytes) == 0;
}

Tensor fingerprint(const Tensor& tensor) {
  check_contiguous("fingerprint", "tensor", tensor);
  const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  const int64_t size = num_bytes(tensor);
  check(bytes != nullptr || size == 0,
        "fingerprint: `tensor` has no memory at its address; pass a ", "plain one");
  Tensor result = torch::stable::new_empty(tensor, {2}, ScalarType::Long);
  auto* values = static_cast<int64_t*>(result.mutable_data_ptr());
  values[0] = static_cast<int64_t>(hash_bytes(bytes, size));
  values[1] = is_constant(bytes, size, tensor.element_size());
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flex_model, CPU, m) { m.impl("fingerprint", TORCH_BOX(&fingerprint)); }

}  // namespace flex_model
