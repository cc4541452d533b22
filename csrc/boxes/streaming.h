// Streaming copies, which bypass the cache: for tensors larger than the cache, whose lines would be
// read only to be overwritten, and would evict data that the model still needs.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flex_model {

// From this many written bytes on, streaming is faster.
constexpr int64_t kStreamingBytes = int64_t{8} << 20;
// For shards the limit is higher: the model reads them next, and finds them in the cache.
constexpr int64_t kStreamingShardBytes = int64_t{32} << 20;

namespace detail {

// Further targets of the same bytes: their distances from the first target, all multiples of
// kStreamAlignment.
struct Others {
  static constexpr int kMax = 3;
  int64_t distances[kMax] = {};
  int count = 0;
};

constexpr int64_t kStreamAlignment = 64;

// Copies `bytes` bytes to `to` and to the others; they are read once.
using StreamFunction = void (*)(char* to, const Others& others, const char* from, int64_t bytes);

inline void copy_cached(char* to, const Others& others, const char* from, int64_t bytes) {
  std::memcpy(to, from, bytes);
  for (int i = 0; i < others.count; ++i) std::memcpy(to + others.distances[i], from, bytes);
}

#if defined(__x86_64__)

// Copies whole cache lines to aligned targets: four lines to each target before the next one.
template <int kOthers>
__attribute__((target("avx512f"))) void stream_avx512(char* to, const Others& others,
                                                      const char* from, int64_t bytes) {
  char* places[1 + kOthers] = {to};
  for (int i = 0; i < kOthers; ++i) places[1 + i] = to + others.distances[i];
  int64_t at = 0;
  for (; at + 256 <= bytes; at += 256) {
    const __m512i a = _mm512_loadu_si512(from + at);
    const __m512i b = _mm512_loadu_si512(from + at + 64);
    const __m512i c = _mm512_loadu_si512(from + at + 128);
    const __m512i d = _mm512_loadu_si512(from + at + 192);
    for (char* place : places) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(place + at), a);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(place + at + 64), b);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(place + at + 128), c);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(place + at + 192), d);
    }
  }
  for (; at < bytes; at += 64) {
    const __m512i a = _mm512_loadu_si512(from + at);
    for (char* place : places) _mm512_stream_si512(reinterpret_cast<__m512i*>(place + at), a);
  }
}

template <int kOthers>
__attribute__((target("avx2"))) void stream_avx2(char* to, const Others& others, const char* from,
                                                 int64_t bytes) {
  char* places[1 + kOthers] = {to};
  for (int i = 0; i < kOthers; ++i) places[1 + i] = to + others.distances[i];
  for (int64_t at = 0; at + 64 <= bytes; at += 64) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at + 32));
    for (char* place : places) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(place + at), a);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(place + at + 32), b);
    }
  }
}

// Copies whole cache lines by `kStreams[others.count]`, and the bytes before and after them through
// the cache.
template <const StreamFunction* kStreams>
void stream_aligned(char* to, const Others& others, const char* from, int64_t bytes) {
  const int64_t head = -reinterpret_cast<intptr_t>(to) & (kStreamAlignment - 1);
  if (bytes < head + kStreamAlignment) return copy_cached(to, others, from, bytes);
  const int64_t tail = (bytes - head) % kStreamAlignment, middle = bytes - head - tail;
  if (head > 0) copy_cached(to, others, from, head);
  kStreams[others.count](to + head, others, from + head, middle);
  if (tail > 0) copy_cached(to + head + middle, others, from + head + middle, tail);
}

inline constexpr StreamFunction kAvx512[] = {stream_avx512<0>, stream_avx512<1>, stream_avx512<2>,
                                             stream_avx512<3>};
inline constexpr StreamFunction kAvx2[] = {stream_avx2<0>, stream_avx2<1>, stream_avx2<2>,
                                           stream_avx2<3>};

inline StreamFunction find_stream() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return stream_aligned<kAvx512>;
  if (__builtin_cpu_supports("avx2")) return stream_aligned<kAvx2>;
  return copy_cached;
}

// Streamed stores are not ordered with other stores: call this before signalling another process.
inline void finish_streaming() { _mm_sfence(); }

#else

inline StreamFunction find_stream() { return copy_cached; }
inline void finish_streaming() {}

#endif

// The stream function for this processor, chosen once.
inline const StreamFunction stream_to_each = find_stream();

inline void stream(char* to, const char* from, int64_t bytes) {
  stream_to_each(to, {}, from, bytes);
}

}  // namespace detail
}  // namespace flex_model
