#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>

#include "machine.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace flex_model {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error("shared memory: " + what + ": " + std::strerror(errno));
}

// Maps the whole file: shared, with its pages faulted in, or private (copy on write).
char* map(int fd, int64_t bytes, bool is_private = false) {
  const int flags = is_private ? MAP_PRIVATE | MAP_NORESERVE : MAP_SHARED;
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (at == MAP_FAILED) fail("can't map " + std::to_string(bytes) + " bytes");
  // Faulting in each page during a copy costs as much as the copy. Older kernels don't know this
  // advice: there pages are faulted in when they are touched.
  if (!is_private) madvise(at, bytes, MADV_POPULATE_WRITE);
  return static_cast<char*>(at);
}

}  // namespace

Segment::Segment(Segment&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      address_(other.address_),
      file_(std::move(other.file_)),
      kept_by_(other.kept_by_) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(address_, other.address_);
  std::swap(file_, other.file_);
  std::swap(kept_by_, other.kept_by_);
  return *this;
}

Segment::~Segment() {
  // In a child without the mapping, another one may have this address by now.
  const bool is_mapped = data_ != nullptr && (kept_by_ < 0 || kept_by_ == getpid());
  if (is_mapped) munmap(data_ - page_bytes(), address_.bytes + page_bytes());
}

Segment Segment::create(int64_t bytes) {
  const int64_t size = bytes + page_bytes();
  Descriptor file(memfd_create("flex_model", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.get() < 0) fail("memfd_create");
  // Allocated now: a write to a page that can't be allocated would be a SIGBUS.
  if (fchmod(file.get(), 0600) != 0 || ftruncate(file.get(), size) != 0 ||
      fallocate(file.get(), 0, 0, size) != 0) {
    fail("can't get " + std::to_string(size) + " bytes");
  }
  // Sealed, so that no process can shrink it while others map it.
  fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  Segment segment;
  char* start = map(file.get(), size);
  std::random_device random;
  const uint64_t token = static_cast<uint64_t>(random()) << 32 | random();
  std::memcpy(start, &token, sizeof(token));
  segment.data_ = start + page_bytes();
  segment.address_ = {getpid(), file.get(), token, bytes};
  segment.file_ = std::move(file);
  return segment;
}

Segment Segment::open(const SegmentAddress& address) {
  Segment segment = open_as(address, false);
  segment.keep_from_children();
  return segment;
}

Segment Segment::open_private(const SegmentAddress& address) { return open_as(address, true); }

Segment Segment::open_as(const SegmentAddress& address, bool is_private) {
  const int64_t size = address.bytes + page_bytes();
  const std::string path =
      "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  const Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (file.get() < 0) fail("can't open the memory of process " + std::to_string(address.pid));
  struct stat status;
  if (fstat(file.get(), &status) != 0 || status.st_size != size) {
    throw std::runtime_error("shared memory: process " + std::to_string(address.pid) +
                             " is not the one that was meant: its memory has another size");
  }
  Segment segment;
  char* start = map(file.get(), size, is_private);
  segment.data_ = start + page_bytes();
  segment.address_ = address;  // without the file, which the mapping keeps
  // The process number may be another process's by now, or one of another container.
  if (std::memcmp(start, &address.token, sizeof(address.token)) != 0) {
    throw std::runtime_error("shared memory: process " + std::to_string(address.pid) +
                             " is not the one that was meant; ranks in containers of their own "
                             "don't share memory");
  }
  return segment;
}

void Segment::keep_from_children() {
  if (madvise(data_ - page_bytes(), address_.bytes + page_bytes(), MADV_DONTFORK) == 0) {
    kept_by_ = getpid();
  }
}

char* Segment::begin_detach() const noexcept {
  void* copy = mmap(nullptr, address_.bytes + page_bytes(), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return copy == MAP_FAILED ? nullptr : static_cast<char*>(copy) + page_bytes();
}

void Segment::end_detach(char* copy) noexcept {
  const int64_t size = address_.bytes + page_bytes();
  char* start = data_ - page_bytes();
  // Without memory for a copy, no access is better than one to the parent's memory.
  if (copy == nullptr ||
      mremap(copy - page_bytes(), size, size, MREMAP_MAYMOVE | MREMAP_FIXED, start) == MAP_FAILED) {
    mprotect(start, size, PROT_NONE);
  }
}

}  // namespace flex_model
