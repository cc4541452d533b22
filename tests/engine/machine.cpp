// What the engine knows of its machine.
//
//   machine memory ROOT   prints free_machine_bytes of the files below ROOT
//   machine pages BYTES   checks the pool as on a kernel with pages of that size; exits with 0
//   machine processes -   checks how the ends of processes are seen; exits with 0
//
// Linked with -Wl,--wrap=sysconf.
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "shared_memory/arena.h"
#include "shared_memory/machine.h"

namespace {

long page_size = 0;  // 0: the kernel's

bool ok = true;

void expect(bool is_so, const char* what) {
  if (!is_so) std::printf("not so: %s\n", what);
  ok = ok && is_so;
}

void check_pages() {
  using namespace flex_model;
  const int64_t page = page_size;
  expect(page_bytes() == page, "the size of a page");

  // The token has a page of its own, so that the memory behind it begins with one.
  const Segment segment = Segment::create(3 * page);
  char token[sizeof(uint64_t)];
  const int fd = segment.address().fd;
  expect(pread(fd, token, sizeof(token), 0) == sizeof(token), "the token can be read");
  expect(std::memcmp(token, &segment.address().token, sizeof(token)) == 0, "the token is first");
  segment.data()[0] = 'x';
  expect(pread(fd, token, 1, page) == 1 && token[0] == 'x', "the memory begins a page later");
  struct stat status;
  expect(fstat(fd, &status) == 0 && status.st_size == 4 * page, "the file is a page longer");
  const Segment opened = Segment::open(segment.address());
  expect(opened.data()[0] == 'x', "others see the memory");

  // Shared leases are mapped by others, so no two have a page in common.
  Arena& arena = Arena::of_process();
  arena.table();
  char* const before = arena.lease(100);
  int64_t last = -page;
  for (const int64_t bytes : {int64_t{1}, page, page + 1, int64_t{5}}) {
    const Arena::Shared lease = arena.lease_shared(bytes);
    const Place place = arena.place_of(lease.data, bytes);
    expect(place.segment == 0 && place.offset % page == 0, "a shared lease begins with a page");
    expect(place.offset >= last + page, "a page is in one shared lease only");
    last = place.offset + (bytes - 1) / page * page;
  }
  char* const after = arena.lease(100);
  expect(arena.place_of(after, 100).offset / page != last / page, "nor in another lease");
  arena.end_lease(before);
  arena.end_lease(after);
}

void* sleep_on(void*) {
  pause();
  return nullptr;
}

void check_processes() {
  using flex_model::process_start;
  expect(process_start(getpid()) > 0, "a process has a start");
  expect(process_start(getpid()) == process_start(getpid()), "always the same one");
  expect(process_start(1 << 30) == 0, "a number without a process has none");

  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_NAME, "a ) 7 Z (");  // a name that looks like the fields after it
    pause();
  }
  const uint64_t start = process_start(child);
  expect(start >= process_start(getpid()), "a child starts later");
  usleep(20000);  // it has its name by now
  expect(process_start(child) == start, "whatever its name is");
  kill(child, SIGKILL);
  siginfo_t info;
  waitid(P_PID, child, &info, WEXITED | WNOWAIT);  // it has ended, and its number is not free yet
  expect(process_start(child) == 0, "one that has ended has none");
  waitpid(child, nullptr, 0);
  expect(process_start(child) == 0, "nor has one that is gone");

  const pid_t threads = fork();
  if (threads == 0) {
    pthread_t thread;
    pthread_create(&thread, nullptr, sleep_on, nullptr);
    pthread_exit(nullptr);
  }
  usleep(50000);
  expect(process_start(threads) > 0, "a process whose first thread has ended may live");
  kill(threads, SIGKILL);
  waitpid(threads, nullptr, 0);
}

}  // namespace

extern "C" long __real_sysconf(int name);
extern "C" long __wrap_sysconf(int name) {
  return name == _SC_PAGESIZE && page_size != 0 ? page_size : __real_sysconf(name);
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  if (std::strcmp(argv[1], "memory") == 0) {
    std::printf("%ld\n", static_cast<long>(flex_model::free_machine_bytes(argv[2])));
    return 0;
  }
  if (std::strcmp(argv[1], "processes") == 0) {
    check_processes();
    return ok ? 0 : 1;
  }
  page_size = std::atol(argv[2]);
  check_pages();
  return ok ? 0 : 1;
}
