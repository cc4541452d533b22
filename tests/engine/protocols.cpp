// Models of the protocols by which ranks share memory, each with controls: the same protocol with
// one part missing, which must fail. A change to a protocol is made here first.
//
//   protocols [-v]
//
// Exits with 0 if every model is as expected; -v prints how the controls fail.
#include <cstring>

#include "explorer.h"

namespace {

using namespace explorer;

Accepts reaches(Value target) {  // as has_reached in flag.h: counters may wrap around
  return [=](Value value) { return static_cast<int32_t>(value - target) >= 0; };
}
Accepts equals(Value expected) {
  return [=](Value value) { return value == expected; };
}

// group.h: rounds of messages. Rank r posts round n in one of its buffers, and reads the others';
// it begins the next round when all have posted this one. A rank that only sends
// does not read.
struct Rounds {
  int num_ranks = 2, num_rounds = 4;
  int num_buffers = 2;
  bool waits = true;
  Order post = kSeqCst, wait = kAcquire;

  Program program() const {
    Program p(num_ranks);
    const Value start = 0xfffffffe;  // the counter wraps around
    const std::vector<int> posted = p.places("posted", num_ranks, start);
    std::vector<std::vector<int>> message;
    for (int r = 0; r < num_ranks; ++r) message.push_back(p.places("message", num_buffers));
    for (int me = 0; me < num_ranks; ++me) {
      for (int n = 1; n <= num_rounds; ++n) {
        for (int r = 0; waits && r < num_ranks; ++r) {
          if (r != me) p[me].await(posted[r], reaches(start + n - 1), wait);
        }
        p[me].write(message[me][n % num_buffers], 10 * n + me);
        p[me].store(posted[me], start + n, post);
        for (int r = 0; r < num_ranks && (n + me) % 3 != 0; ++r) {
          if (r == me) continue;
          p[me].await(posted[r], reaches(start + n), wait);
          p[me].read(message[r][n % num_buffers], 10 * n + r);
        }
      }
    }
    return p;
  }
};

// all_gather.cpp and from_first.cpp, large tensors: a round says where a rank's tensor is, the
// others access it directly, and a second round ends that. `writes`: each rank writes its part of
// every rank's tensor; else all read the first rank's. Then the owner uses the tensor again.
struct Direct {
  bool writes = true;
  bool waits_for_all = true;
  int num_ranks = 3;

  Program program() const {
    Program p(num_ranks);
    const std::vector<int> posted = p.places("posted", num_ranks);
    std::vector<std::vector<int>> tensor;  // of each rank: the part that each rank writes
    for (int r = 0; r < num_ranks; ++r) tensor.push_back(p.places("tensor", num_ranks));
    for (int me = 0; me < num_ranks; ++me) {
      Value round = 0;
      const auto wait_for_all = [&] {
        for (int r = 0; r < num_ranks; ++r) {
          if (r != me) p[me].await(posted[r], reaches(round), kAcquire);
        }
      };
      const auto post = [&] {
        wait_for_all();
        p[me].store(posted[me], ++round, kSeqCst);
      };
      for (Value n = 1; n <= 2; ++n) {
        if (!writes && me == 0) p[me].write(tensor[0][0], n);
        post();
        for (int r = 0; r < num_ranks; ++r) {
          if (r != me) p[me].await(posted[r], reaches(round), kAcquire);
          if (writes) p[me].write(tensor[r][me], n);
        }
        if (!writes && me != 0) p[me].read(tensor[0][0], n);
        post();
        if (waits_for_all && (writes || me == 0)) wait_for_all();
        for (int r = 0; writes && r < num_ranks; ++r) p[me].read(tensor[me][r], n);
      }
    }
    return p;
  }
};

// flag.cpp: raise and sleep_while, with the kernel's part in FUTEX_WAIT and FUTEX_WAKE. A sleeper
// that nobody wakes is stuck here; in fact it polls after 20 ms.
struct Futex {
  Order store = kSeqCst, load = kSeqCst, add = kSeqCst;
  bool kernel_fence = true;

  Program program() const {
    Program p(2);
    const int value = p.place("value"), sleepers = p.place("num_sleepers");
    const int lock = p.place("lock"), queue = p.place("queue"), woken = p.place("woken");
    Thread& raiser = p[0];
    raiser.store(value, 1, store).load(sleepers, 0, load);
    raiser.when([](const Registers& r) { return r[0] > 0; },
                [&] {
                  raiser.exchange_when(lock, equals(0), 1, kAcquire).load(queue, 1, kRelaxed);
                  raiser.when(is(1, 1), [&] { raiser.store(woken, 1, kRelease); });
                  raiser.store(lock, 0, kRelease);
                });
    Thread& sleeper = p[1];
    sleeper.load(value, 0, kSeqCst);
    sleeper.when(is(0, 0), [&] {
      sleeper.fetch_add(sleepers, 1, add);
      if (kernel_fence) sleeper.fence(kSeqCst);  // smp_mb of futex_hb_waiters_inc
      sleeper.exchange_when(lock, equals(0), 1, kAcquire).load(value, 1, kRelaxed);
      sleeper.when(is(1, 0), [&] { sleeper.store(queue, 1, kRelaxed); });
      sleeper.store(lock, 0, kRelease);
      sleeper.when(is(1, 0), [&] { sleeper.await(woken, equals(1), kAcquire); });
    });
    return p;
  }
};

// arena.cpp, all_gather.cpp: a shared lease. The first rank counts the readers before its post; a
// reader is released after its view; the memory is leased again when it has no reader.
struct Leases {
  Order release_reader = kAcqRel, count_unread = kRelease;
  bool counts_before_post = true;
  int num_readers = 2;

  Program program() const {
    Program p(2 + num_readers);
    const int posted = p.place("posted"), readers = p.place("readers"), leased = p.place("leased");
    const int num_unread = p.place("num_unread"), memory = p.place("memory");
    const auto release = [&](Thread& t) {
      t.fetch_add(readers, static_cast<Value>(-1), release_reader, 0);
      t.when(is(0, 1), [&] { t.fetch_add(num_unread, 1, count_unread); });
    };
    Thread& owner = p[0];
    owner.write(memory, 5).store(readers, 1, kRelease);  // the writer is a reader
    owner.store(leased, 1, kRelease);
    if (counts_before_post) owner.fetch_add(readers, num_readers, kSeqCst);
    owner.store(posted, 1, kSeqCst);
    if (!counts_before_post) owner.fetch_add(readers, num_readers, kSeqCst);
    release(owner);
    Thread& other = p[1 + num_readers];  // of the first rank: end_unread, at another lease
    other.await(leased, equals(1), kAcquire).load(num_unread, 1, kAcquire);
    other.when([](const Registers& r) { return r[1] != 0; },
               [&] {
                 other.load(readers, 2, kAcquire);
                 // Whoever sees the count must see no reader, or the lease would not end before
                 // another does.
                 other.check(is(2, 0)).write(memory, 9);
               });
    for (int r = 1; r <= num_readers; ++r) {
      p[r].await(posted, equals(1), kAcquire).read(memory, 5);
      release(p[r]);
    }
    return p;
  }
};

// from_first.cpp, group.cpp: a reader copies the first rank's tensor, and then checks that no rank
// has aborted; from then on the first rank may write to the tensor, as it does here. The copy may
// be torn; what counts is that the check sees the abort.
struct Check {
  bool owner_fence = true, reader_fence = true;

  Program program() const {
    Program p(3);
    const int state = p.place("state"), tensor = p.place("tensor", 1);
    p[0].fetch_add(state, 1, kSeqCst);  // begin_abort: an exchange, whether it succeeds or not
    if (owner_fence) p[0].fence(kRelease);
    p[0].store(tensor, 2, kRelaxed);
    p[1].load(tensor, 0, kRelaxed);
    if (reader_fence) p[1].fence(kAcquire);
    p[1].load(state, 1, kAcquire);
    p[1].check([](const Registers& r) { return r[0] == 1 || r[1] != 0; });
    p[2].fetch_add(state, 1, kSeqCst);  // another rank that aborts
    return p;
  }
};

// group.cpp: a SharedText of two bytes, written twice. Text 0 is "00", text n is "nn".
struct Notice {
  bool counts = true, writer_fence = true, reader_fence = true;
  Order last_store = kRelease, first_load = kAcquire;

  Program program() const {
    Program p(2);
    const int version = p.place("version"), first = p.place("byte"), second = p.place("byte");
    for (Value n = 1; n <= 2; ++n) {
      if (counts) p[0].store(version, 2 * n - 1, kRelaxed);
      if (writer_fence) p[0].fence(kRelease);
      p[0].store(first, n, kRelaxed).store(second, n, kRelaxed);
      if (counts) p[0].store(version, 2 * n, last_store);
    }
    p[1].load(version, 0, first_load).load(first, 1, kRelaxed).load(second, 2, kRelaxed);
    if (reader_fence) p[1].fence(kAcquire);
    p[1].load(version, 3, kRelaxed);
    p[1].check([](const Registers& r) {
      const bool is_valid = r[0] % 2 == 0 && r[0] == r[3];
      return !is_valid || (r[1] == r[2] && 2 * r[1] == r[0]);
    });
    if (!counts) {
      p[1].check([](const Registers& r) { return r[1] == r[2]; });
    }
    return p;
  }
};

// barrier.cuh, peer_memory.py: a barrier of GPUs between the writes to a slot and its reads, in the
// kernel that reads. A rank has a stream of launches: a copy to a slot, then a kernel whose blocks
// signal, wait and read. Its next launch begins when all blocks have ended. That a block signals
// all peers before it waits for one is the weakest order of its threads. Transfers: g(ather),
// s(catter: the first rank writes into the others' slots), b(roadcast).
struct Peers {
  int num_ranks = 2;
  int num_slots = 2;
  bool at_once = true;  // else the GPU runs one block after the other, the last one first
  bool all_signal = true, waits_for_all = true, ends_together = true;
  Order signal = kRelease, wait = kAcquire;
  const char* transfers = "gsbsg";

  static constexpr int kBlocks = 2;

  Program program() const {
    Program p(num_ranks * (at_once ? kBlocks : 1));
    std::vector<std::vector<int>> pad, slot, ended;
    for (int r = 0; r < num_ranks; ++r) {
      pad.push_back(p.places("pad", num_ranks));
      slot.push_back(p.places("slot", num_slots));
      ended.push_back(p.places("ended", kBlocks));
    }
    for (int me = 0; me < num_ranks; ++me) {
      const auto thread = [&](int block) -> Thread& {
        return p[at_once ? me * kBlocks + block : me];
      };
      // All blocks of the rank: the launches so far have ended, of which this is the `count`-th.
      const auto end_launch = [&](Value count) {
        for (int block = 0; at_once && ends_together && block < kBlocks; ++block) {
          thread(block).store(ended[me][block], count, kRelease);
        }
        for (int block = 0; at_once && ends_together && block < kBlocks; ++block) {
          thread(block).await(ended[me][1 - block], reaches(count), kAcquire);
        }
      };
      for (Value n = 1; n <= std::strlen(transfers); ++n) {
        const char kind = transfers[n - 1];
        for (int r = 0; r < num_ranks; ++r) {
          const bool writes = kind == 'g' ? r == me : me == 0 && (kind == 's' ? r != 0 : r == 0);
          if (writes) thread(0).write(slot[r][n % num_slots], 10 * n + r);
        }
        end_launch(2 * n - 1);
        for (int block = kBlocks - 1; block >= 0; --block) {
          const auto reads = [&](int r) {
            const bool is_read = kind == 'g' || (me != 0 && (kind == 's' ? r == me : r == 0));
            return is_read && r % kBlocks == block;
          };
          Thread& t = thread(block);
          for (int r = 0; r < num_ranks; ++r) {
            if (r != me && (all_signal || block == 0)) t.store(pad[r][me], n, signal);
          }
          for (int r = 0; r < num_ranks; ++r) {
            if (r != me && (waits_for_all || reads(r))) t.await(pad[me][r], reaches(n), wait);
          }
          for (int r = 0; r < num_ranks; ++r) {
            if (reads(r)) t.read(slot[r][n % num_slots], 10 * n + r);
          }
        }
        end_launch(2 * n);
      }
    }
    return p;
  }
};

// peers.cu, peer_memory.py: a pad is zero before its address is known to others.
struct Zeroing {
  bool before_exchange = true;

  Program program() const {
    Program p(3);
    const int pad = p.place("pad", 77), zeroed = p.place("zeroed"), known = p.place("known");
    p[0].store(pad, 0, kRelaxed).store(zeroed, 1, kRelease);  // cudaMemset, on the device
    if (before_exchange) p[1].await(zeroed, equals(1), kAcquire);
    p[1].store(known, 1, kRelease).await(pad, equals(1), kAcquire);
    p[2].await(known, equals(1), kAcquire).store(pad, 1, kRelease);
    return p;
  }
};

bool ok = true, verbose = false;

template <typename Model>
void expect(const char* finding, const char* what, const Model& model) {
  const Result result = model.program().explore();
  const bool as_expected = result.finding == finding;
  ok = ok && as_expected;
  std::printf("%-58s %8zu states: %-13s%s\n", what, result.num_states,
              result.finding.empty() ? "right" : result.finding.c_str(),
              as_expected ? "" : " NOT AS EXPECTED");
  if (!as_expected || verbose) std::fputs(result.trace.c_str(), stdout);
}

template <typename Model, typename Change>
Model with(Model model, const Change& change) {
  change(model);
  return model;
}

void explore_rounds() {
  expect("", "rounds: 2 ranks, 5 rounds", Rounds{2, 5});
  expect("", "rounds: 3 ranks, 4 rounds", Rounds{3, 4});
  const auto broken = [](const char* finding, const char* what, const auto& change) {
    expect(finding, what, with(Rounds{}, change));
  };
  broken("data race", "  one buffer", [](Rounds& r) { r.num_buffers = 1; });
  broken("data race", "  begin without a wait", [](Rounds& r) { r.waits = false; });
  broken("data race", "  relaxed post", [](Rounds& r) { r.post = kRelaxed; });
  broken("data race", "  relaxed wait", [](Rounds& r) { r.wait = kRelaxed; });
  expect("", "written directly: 3 ranks, twice", Direct{true});
  expect("data race", "  an end without a wait", Direct{true, false});
  expect("", "read directly: 3 ranks, twice", Direct{false});
  expect("data race", "  an end without a wait", Direct{false, false});
}

void explore_futex() {
  expect("", "raise and sleep", Futex{});
  const auto broken = [](const char* what, const auto& change) {
    expect("stuck", what, with(Futex{}, change));
  };
  broken("  raise: release and acquire", [](Futex& f) { f.store = kRelease, f.load = kAcquire; });
  broken("  raise: the load is acquire", [](Futex& f) { f.load = kAcquire; });
  broken("  sleep: no barrier before the kernel's look",
         [](Futex& f) { f.add = kRelaxed, f.kernel_fence = false; });
}

void explore_leases() {
  expect("", "shared leases: 2 readers", Leases{});
  const auto broken = [](const char* finding, const char* what, const auto& change) {
    expect(finding, what, with(Leases{}, change));
  };
  broken("data race", "  relaxed release of a reader",
         [](Leases& l) { l.release_reader = kRelaxed; });
  broken("check failed", "  relaxed count", [](Leases& l) { l.count_unread = kRelaxed; });
  broken("data race", "  readers counted after the post",
         [](Leases& l) { l.counts_before_post = false; });
}

void explore_texts() {
  expect("", "check after the copy from the first rank", Check{});
  expect("check failed", "  no fence of the owner", Check{false, true});
  expect("check failed", "  no fence of the reader", Check{true, false});
  expect("", "notices", Notice{});
  const auto broken = [](const char* what, const auto& change) {
    expect("check failed", what, with(Notice{}, change));
  };
  broken("  no count", [](Notice& n) { n.counts = false; });
  broken("  no fence of the writer", [](Notice& n) { n.writer_fence = false; });
  broken("  no fence of the reader", [](Notice& n) { n.reader_fence = false; });
  broken("  relaxed end of a write", [](Notice& n) { n.last_store = kRelaxed; });
  broken("  relaxed start of a read", [](Notice& n) { n.first_load = kRelaxed; });
}

void explore_peers() {
  const auto one_by_one = [](Peers& p) { p.at_once = false; };
  expect("", "GPU barrier: 2 ranks, 2 slots", Peers{});
  expect("", "GPU barrier: 2 ranks, a block at a time", with(Peers{}, one_by_one));
  expect("", "GPU barrier: 3 ranks, a block at a time", with(Peers{3}, one_by_one));
  const auto broken = [](const char* finding, const char* what, const auto& change) {
    expect(finding, what, with(Peers{}, change));
  };
  broken("data race", "  one slot", [](Peers& p) { p.num_slots = 1; });
  broken("data race", "  relaxed signal", [](Peers& p) { p.signal = kRelaxed; });
  broken("data race", "  relaxed wait", [](Peers& p) { p.wait = kRelaxed; });
  broken("data race", "  a wait for those that are read",
         [](Peers& p) { p.waits_for_all = false; });
  broken("data race", "  launches that do not wait for each other",
         [](Peers& p) { p.ends_together = false; });
  broken("stuck", "  a signal by the first block, which runs last",
         [](Peers& p) { p.all_signal = p.at_once = false; });
  expect("", "signal pads zeroed before the exchange", Zeroing{});
  expect("stuck", "  zeroed at any time", Zeroing{false});
}

// The explorer itself: what it must and must not exclude.
struct StoreBuffering {  // does one of two threads see the other's store?
  Order store, load;
  bool fence;

  Program program() const {
    Program p(3);
    const std::vector<int> place = p.places("place", 2);
    const int misses = p.place("misses");
    for (int t = 0; t < 2; ++t) {
      p[t].store(place[t], 1, store);
      if (fence) p[t].fence(kSeqCst);
      p[t].load(place[1 - t], 0, load);
      p[t].when(is(0, 0), [&] { p[t].fetch_add(misses, 1, kRelaxed); });
    }
    p[2].load(misses, 0, kRelaxed).check([](const Registers& r) { return r[0] < 2; });
    return p;
  }
};

struct Passing {  // a thread sees a second store: does it see the first, by another thread too?
  bool same_place, through_another;
  Order store, load;

  Program program() const {
    Program p(3);
    const int first = p.place("first"), second = same_place ? first : p.place("second");
    p[0].store(first, 1, kRelaxed);
    if (through_another) {
      p[1].load(first, 0, load).when(is(0, 1), [&] { p[1].store(second, 2, store); });
    } else {
      p[0].store(second, 2, store);
    }
    p[2].load(second, 0, load).load(first, 1, kRelaxed);
    p[2].check([](const Registers& r) { return r[0] != 2 || r[1] != 0; });
    return p;
  }
};

void explore_itself() {
  expect("", "store buffering: sequentially consistent", StoreBuffering{kSeqCst, kSeqCst, false});
  expect("", "store buffering: fences", StoreBuffering{kRelaxed, kRelaxed, true});
  expect("check failed", "  release and acquire", StoreBuffering{kRelease, kAcquire, false});
  expect("", "two stores: released", Passing{false, false, kRelease, kAcquire});
  expect("check failed", "  relaxed store", Passing{false, false, kRelaxed, kAcquire});
  expect("check failed", "  relaxed load", Passing{false, false, kRelease, kRelaxed});
  expect("", "two stores: to one place", Passing{true, false, kRelaxed, kRelaxed});
  expect("", "two stores: by two threads", Passing{false, true, kRelease, kAcquire});
}

}  // namespace

int main(int argc, char** argv) {
  verbose = argc > 1 && std::strcmp(argv[1], "-v") == 0;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  explore_itself();
  explore_rounds();
  explore_futex();
  explore_leases();
  explore_texts();
  explore_peers();
  std::puts(ok ? "all as expected" : "NOT AS EXPECTED");
  return ok ? 0 : 1;
}
