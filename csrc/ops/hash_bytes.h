// A 64-bit hash of bytes.
//
// It folds 16 bytes by one 64 x 64 -> 128 bit product, as wyhash does, in four independent chains
// so that the multiplier never stalls. It depends on every bit and on the order. It is not
// cryptographic, and it differs between machines of different byte order.
#pragma once

#include <cstdint>
#include <cstring>

namespace flex_model {

// The fractional digits of pi: bits without a pattern. The two factors of a product must not start
// from the same key, or swapped words could give the same product.
inline constexpr uint64_t kKeys[4] = {0x243f6a8885a308d3, 0x13198a2e03707345, 0xa4093822299f31d1,
                                      0x082efa98ec4e6c89};
inline constexpr uint64_t kStarts[4] = {0x452821e638d01377, 0xbe5466cf34e90c6d, 0xc0ac29b7c97c50dd,
                                        0x3f84d5b5b5470917};

inline uint64_t load(const unsigned char* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

inline uint64_t fold(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t hash_bytes(const unsigned char* bytes, int64_t size) {
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

}  // namespace flex_model
