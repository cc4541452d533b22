// Copies past the cache: for tensors larger than it, whose lines would be read in only to be
// overwritten, and would push out what the model still needs.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flex_model {

// From how many written bytes on it pays.
constexpr int64_t kStreamingBytes = int64_t{16} << 20;

namespace detail {

using CopyFunction = void (*)(char* to, const char* from, int64_t bytes);

inline void copy_cached(char* to, const char* from, int64_t bytes) { std::memcpy(to, from, bytes); }

#if defined(__x86_64__)

// Bytes up to the next multiple of `alignment`.
inline int64_t bytes_to_alignment(const char* address, int64_t alignment) {
  return -reinterpret_cast<intptr_t>(address) & (alignment - 1);
}

__attribute__((target("avx512f"))) inline void stream_avx512(char* to, const char* from,
                                                             int64_t bytes) {
  constexpr int64_t kVector = 64;
  const int64_t head = bytes_to_alignment(to, kVector);
  if (bytes < head + kVector) return copy_cached(to, from, bytes);
  std::memcpy(to, from, head);
  int64_t at = head;
  for (; at + 4 * kVector <= bytes; at += 4 * kVector) {
    const __m512i a = _mm512_loadu_si512(from + at);
    const __m512i b = _mm512_loadu_si512(from + at + kVector);
    const __m512i c = _mm512_loadu_si512(from + at + 2 * kVector);
    const __m512i d = _mm512_loadu_si512(from + at + 3 * kVector);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + kVector), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + 2 * kVector), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + 3 * kVector), d);
  }
  for (; at + kVector <= bytes; at += kVector) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
  }
  std::memcpy(to + at, from + at, bytes - at);
}

__attribute__((target("avx2"))) inline void stream_avx2(char* to, const char* from, int64_t bytes) {
  constexpr int64_t kVector = 32;
  const int64_t head = bytes_to_alignment(to, kVector);
  if (bytes < head + kVector) return copy_cached(to, from, bytes);
  std::memcpy(to, from, head);
  int64_t at = head;
  for (; at + kVector <= bytes; at += kVector) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at)));
  }
  std::memcpy(to + at, from + at, bytes - at);
}

inline CopyFunction find_streaming_copy() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return stream_avx512;
  if (__builtin_cpu_supports("avx2")) return stream_avx2;
  return copy_cached;
}

// Streamed stores are not ordered with others: before another process is told of them.
inline void finish_streaming() { _mm_sfence(); }

#else

inline CopyFunction find_streaming_copy() { return copy_cached; }
inline void finish_streaming() {}

#endif

// Chosen for the processor that runs this, once.
inline const CopyFunction stream = find_streaming_copy();

}  // namespace detail
}  // namespace flex_model
