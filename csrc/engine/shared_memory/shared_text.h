// A text in shared memory that one process writes and others may read at any time.
//
// A seqlock: the version is odd while the text is written, and a reader accepts only what it copied
// between two equal, even versions. So nobody waits: neither the writer, which must publish before
// it waits itself, nor the readers of a writer that was killed or stopped halfway.
// tests/engine/protocols.cpp has the model, and what each order and fence is needed for.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

namespace flex_model {

// All zero at first, which is an empty text.
class SharedText {
 public:
  static constexpr int64_t kBytes = 504;  // the last one is zero; longer texts are cut

  void write(const std::string& text) {
    const uint32_t version = version_.load(std::memory_order_relaxed);
    version_.store(version + 1, std::memory_order_relaxed);
    // A reader of any byte below sees the odd version, when it looks again.
    std::atomic_thread_fence(std::memory_order_release);
    const size_t size = std::min<size_t>(text.size(), kBytes - 1);
    for (size_t i = 0; i < size; ++i) bytes_[i].store(text[i], std::memory_order_relaxed);
    bytes_[size].store('\0', std::memory_order_relaxed);
    version_.store(version + 2, std::memory_order_release);
  }

  // None while the text is being written, also by a process that has ended there.
  std::optional<std::string> read() const {
    for (int i = 0; i < kTries; ++i) {
      const uint32_t version = version_.load(std::memory_order_acquire);
      if (version % 2 != 0) continue;
      std::string text;
      for (const std::atomic<char>& byte : bytes_) {
        const char c = byte.load(std::memory_order_relaxed);
        if (c == '\0') break;
        text.push_back(c);
      }
      std::atomic_thread_fence(std::memory_order_acquire);  // the bytes before the second look
      if (version_.load(std::memory_order_relaxed) == version) return text;
    }
    return std::nullopt;
  }

 private:
  static constexpr int kTries = 100;  // a write takes less time than these

  // Bytes are atomic because readers copy them while they change, which for others is undefined.
  std::atomic<uint32_t> version_;
  std::atomic<char> bytes_[kBytes];
};

}  // namespace flex_model
