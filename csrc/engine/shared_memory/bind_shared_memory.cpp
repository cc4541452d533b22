#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>

#include "arena.h"
#include "dlpack.h"
#include "group.h"
#include "machine.h"
#include "messages.h"
#include "span.h"
#include "transfer.h"

namespace py = pybind11;

namespace flex_model {
namespace {

using AddressTuple = std::tuple<int32_t, int32_t, uint64_t, int64_t>;  // pid, fd, token, bytes
using NoGil = py::call_guard<py::gil_scoped_release>;

AddressTuple to_tuple(const SegmentAddress& address) {
  return {address.pid, address.fd, address.token, address.bytes};
}

SegmentAddress to_address(const AddressTuple& tuple) {
  return {std::get<0>(tuple), std::get<1>(tuple), std::get<2>(tuple), std::get<3>(tuple)};
}

std::vector<char*> memory_of(const std::vector<Span>& spans, int64_t needed, const char* what) {
  std::vector<char*> result;
  for (const Span& span : spans) result.push_back(span.of_size(needed, what));
  return result;
}

// The size of a rank's shard in bytes.
int64_t shard_bytes(const GatherPlan& plan, int64_t rank) {
  const std::vector<int64_t>& bytes = plan.box_plan().shard_bytes;
  if (rank < 0 || rank >= static_cast<int64_t>(bytes.size()))
    throw py::index_error("shared memory: the plan has no shard of rank " + std::to_string(rank));
  return bytes[rank];
}

// As shard_bytes, for this rank; -1 if it holds no shard.
int64_t own_bytes(const Group& group, const GatherPlan& plan, const std::vector<int64_t>& ranks) {
  const auto place = std::find(ranks.begin(), ranks.end(), group.rank());
  return place == ranks.end() ? -1 : shard_bytes(plan, place - ranks.begin());
}

// The size of the full tensor, on the first rank; -1 elsewhere.
int64_t full_bytes(const Group& group, const GatherPlan& plan) {
  return group.rank() == 0 ? plan.box_plan().full_bytes : -1;
}

// The control block, kept by the group's first rank until all have opened it.
class ControlBlock {
 public:
  explicit ControlBlock(int64_t num_ranks) : segment_(Group::make_control(num_ranks)) {}
  AddressTuple address() const { return to_tuple(segment_.address()); }
  Segment take() { return std::move(segment_); }

 private:
  Segment segment_;
};

ArenaTable& own_table() {
  Arena::of_process().table();
  return Arena::of_process().own_table();
}

// Offers the control block of a new group to its other ranks.
void offer_control(uint64_t number, const ControlBlock& block) {
  own_table().control = to_address(block.address());
  own_table().offered.store(number, std::memory_order_release);
}

// The address of the control block that another process offers; none as long as it offers none by
// this number. std::runtime_error if it can't share memory.
std::optional<AddressTuple> offered_control(const AddressTuple& address, uint64_t number) {
  const Segment segment = Segment::open(to_address(address));
  const auto& table = *reinterpret_cast<const ArenaTable*>(segment.data());
  if (table.offered.load(std::memory_order_acquire) == number) return to_tuple(table.control);
  if (table.refused.load(std::memory_order_acquire) == number) {
    throw std::runtime_error("shared memory: the first rank of this host can't share it");
  }
  return std::nullopt;
}

// Runs Python's signal handlers (Ctrl-C) during long waits, and then `callback` if there is one.
void watch(Group& group, const std::optional<std::function<void(double)>>& callback) {
  group.set_watch([callback](double waited_s) {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (callback) (*callback)(waited_s);
  });
}

std::unique_ptr<Group> make_group(Segment control, const std::vector<AddressTuple>& tables,
                                  int64_t rank) {
  std::vector<Group::Rank> ranks;
  for (const AddressTuple& table : tables) {
    ranks.push_back({std::get<0>(table), to_address(table)});
  }
  auto shared = std::make_shared<Segment>(std::move(control));
  auto group = std::make_unique<Group>(std::move(shared), std::move(ranks), rank);
  watch(*group, {});
  return group;
}

std::vector<py::bytes> exchange_bytes(Group& group, const std::string& local) {
  std::string all(local.size() * group.size(), '\0');
  {
    const py::gil_scoped_release no_gil;
    exchange(group, local.data(), static_cast<int64_t>(local.size()), all.data());
  }
  std::vector<py::bytes> result;
  for (int64_t r = 0; r < group.size(); ++r) {
    result.emplace_back(all.data() + r * local.size(), local.size());
  }
  return result;
}

std::vector<py::bytes> gather_headers(Group& group, const std::string& header,
                                      const std::pair<size_t, size_t>& may_differ,
                                      const GatherPlan& plan, const std::vector<int64_t>& places,
                                      const Span& shard, const std::vector<Span>& fulls) {
  const char* const from =
      shard.of_size(own_bytes(group, plan, places), "gather_at_once: the shard");
  const std::vector<char*> to =
      memory_of(fulls, plan.box_plan().full_bytes, "gather_at_once: a full tensor");
  if (may_differ.first > may_differ.second || may_differ.second > header.size() ||
      (!places.empty() && places.size() != plan.box_plan().shard_bytes.size())) {
    throw py::value_error("gather_at_once");
  }
  std::vector<std::string> headers;
  {
    const py::gil_scoped_release no_gil;
    headers = gather_at_once(group, header, {may_differ.first, may_differ.second}, plan, places,
                             from, to);
  }
  return {headers.begin(), headers.end()};
}

std::vector<py::object> all_gather_views(Group& group, const GatherPlan& plan, const Span& shard,
                                         const std::vector<Span>& fulls, int64_t number,
                                         const std::vector<int64_t>& sizes, int code, int bits) {
  int64_t bytes = bits / 8;
  for (int64_t size : sizes) bytes *= size;
  if (bytes != plan.box_plan().full_bytes) throw py::value_error("all_gather_views: sizes");
  const char* const from = shard.of_size(shard_bytes(plan, group.rank()), "all_gather: the shard");
  const std::vector<char*> to =
      memory_of(fulls, plan.box_plan().full_bytes, "all_gather: a full tensor");
  std::vector<Owned> owned;
  {
    const py::gil_scoped_release no_gil;
    owned = all_gather(group, plan, from, to, number);
  }
  std::vector<py::object> tensors;
  for (Owned& memory : owned) {
    tensors.push_back(as_tensor(std::move(memory), sizes, code, bits));
  }
  return tensors;
}

using GatheredTuple = std::tuple<const GatherPlan*, std::vector<int64_t>, Span, Span>;

void gather_tuples_to_first(Group& group, const std::vector<GatheredTuple>& tuples) {
  std::vector<Gathered> tensors;
  for (const auto& [plan, ranks, shard, full] : tuples) {
    const char* const from =
        shard.of_size(own_bytes(group, *plan, ranks), "gather_to_first: the shard");
    char* const to = full.of_size(full_bytes(group, *plan), "gather_to_first: the full tensor");
    tensors.push_back({plan, ranks, from, to});
  }
  const py::gil_scoped_release no_gil;
  gather_to_first(group, tensors);
}

// An OpenGather that owns the objects it refers to.
class OwningGather {
 public:
  using Tuple = std::tuple<py::object, std::vector<int64_t>, py::object>;  // plan, ranks, full
  using Target = std::tuple<uintptr_t, uintptr_t, int64_t>;  // full, segment and its bytes

  OwningGather(Group& group, const std::vector<Tuple>& tuples) {
    for (const auto& [plan, ranks, full] : tuples) {
      const auto* boxes = plan.cast<const GatherPlan*>();
      const Span target = Span::of(full);
      char* const to = target.of_size(full_bytes(group, *boxes), "open_gather: the full tensor");
      kept_.push_back(plan);
      kept_.push_back(full);
      tensors_.push_back({boxes, ranks, nullptr, to});
      own_bytes_.push_back(own_bytes(group, *boxes, ranks));
    }
    const py::gil_scoped_release no_gil;
    gather_ = std::make_unique<OpenGather>(group, tensors_);
  }

  std::vector<Target> targets() const {
    std::vector<Target> result;
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const OpenGather::Target& target = gather_->target(t);
      result.emplace_back(reinterpret_cast<uintptr_t>(target.full),
                          reinterpret_cast<uintptr_t>(target.segment.data), target.segment.bytes);
    }
    return result;
  }

  void end(const std::vector<Span>& shards) {
    std::vector<const char*> from;
    for (size_t t = 0; t < shards.size(); ++t) {
      const bool is_given = shards[t].data != nullptr && t < own_bytes_.size();
      from.push_back(shards[t].of_size(is_given ? own_bytes_[t] : -1, "OpenGather.end: the shard"));
    }
    gather_->end(from);
  }

 private:
  std::vector<py::object> kept_;
  std::vector<int64_t> own_bytes_;
  std::vector<Gathered> tensors_;
  std::unique_ptr<OpenGather> gather_;
};

void bind_errors(py::module_& m) {
  static PyObject* failed = PyErr_NewExceptionWithDoc(
      "flex_model._C.WaitError",
      "A failed wait for other ranks: (reason, ranks, text), where the reason is "
      "'late', 'dead', 'broken' or 'out of step'.",
      PyExc_RuntimeError, nullptr);
  m.add_object("WaitError", py::reinterpret_borrow<py::object>(failed));
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const WaitError& error) {
      static const char* const names[] = {"late", "dead", "broken", "out of step"};
      const py::object arguments = py::make_tuple(names[error.reason], error.ranks, error.text);
      PyErr_SetObject(failed, arguments.ptr());
    }
  });
}

}  // namespace

void bind_shared_memory(py::module_& m) {
  bind_errors(m);
  m.def("lease_tensor", &lease_tensor,
        "A DLPack capsule of pooled CPU memory that peers can reach, or None if the arena is full.",
        py::arg("sizes"), py::arg("code"), py::arg("bits"));
  m.def(
      "arena_table", [] { return to_tuple(Arena::of_process().table()); },
      "The address by which peers open this process's arena: (pid, fd, token, bytes).");
  m.def("offer_control", &offer_control,
        "Offer the control block of a new group to its other ranks.", py::arg("number"),
        py::arg("control"));
  m.def("offered_control", &offered_control,
        "The address of the control block that the process with this table offers; None as long as "
        "it offers none by this number. RuntimeError if it can't.",
        py::arg("table"), py::arg("number"), NoGil());
  m.def(
      "refuse_group",
      [](uint64_t number) { own_table().refused.store(number, std::memory_order_release); },
      "Tell the other ranks of a new group that this one can't share memory.", py::arg("number"));
  m.def("process_start", &process_start,
        "When a process started, in ticks; 0 if there is none, or it has ended.", py::arg("pid"));
  m.def(
      "set_arena_limit", [](int64_t bytes) { Arena::of_process().set_limit(bytes); },
      "Set how many bytes the arena may hold; -1 for as many as the machine has.",
      py::arg("bytes"));
  m.def(
      "arena_bytes",
      [] {
        return std::make_pair(Arena::of_process().held_bytes(), Arena::of_process().leased_bytes());
      },
      "Bytes that the arena holds, and how many of them are leased.");
  m.def(
      "arena_segment",
      [](uintptr_t address) {
        const auto* data = reinterpret_cast<const char*>(address);
        const MemoryRange segment = Arena::of_process().segment_of(data);
        return std::make_pair(reinterpret_cast<uintptr_t>(segment.data), segment.bytes);
      },
      "Address and bytes of the arena's segment that contains an address; (0, 0) if none does.",
      py::arg("address"));
  m.def("worthwhile_view_bytes", &CowMapping::worthwhile_bytes,
        "The size in bytes above which all_gather_views costs less than copies; -1: it makes "
        "copies.");
  m.def("views_without_notes", &CowMapping::disable_tracking,
        "Set whether views made from now on do without the kernel's tracking of writes.",
        py::arg("without"));
  m.def(
      "close_arena", [] { Arena::of_process().close(); },
      "Free the memory that is not leased, and the rest as leases end; for when no group is left.");

  py::class_<ControlBlock>(m, "ControlBlock", "The memory that the ranks of a HostGroup share.")
      .def(py::init<int64_t>(), py::arg("num_ranks"))
      .def_property_readonly("address", &ControlBlock::address, "The argument of HostGroup.open.");

  py::class_<Group>(m, "HostGroup", "Ranks of one host that share memory.")
      .def_static(
          "made",
          [](ControlBlock& control, const std::vector<AddressTuple>& tables, int64_t rank) {
            return make_group(control.take(), tables, rank);
          },
          "Make the group on the rank that made the block. `tables`: each rank's `arena_table()`.",
          py::arg("control"), py::arg("tables"), py::arg("rank"))
      .def_static(
          "open",
          [](const AddressTuple& control, const std::vector<AddressTuple>& tables, int64_t rank) {
            return make_group(Segment::open(to_address(control)), tables, rank);
          },
          "Make the group on the other ranks. RuntimeError if the memory can't be opened.",
          py::arg("control"), py::arg("tables"), py::arg("rank"))
      .def_property_readonly("rank", &Group::rank, "The index of this process.")
      .def_property_readonly("size", &Group::size, "Number of ranks.")
      .def_property_readonly("is_broken", &Group::is_broken, "Whether a rank has aborted.")
      .def("who_opened", &Group::who_opened,
           "Of each rank of the new group of this number: 1 if it opened all that it needs, -1 if "
           "it can't, 0 if it is not known yet.",
           py::arg("number"))
      .def("set_timeout", &Group::set_timeout, "Set the deadline of a wait, in seconds.",
           py::arg("seconds"))
      .def("set_position", &Group::set_position,
           "Set this rank's position, which ranks that wait for it report.", py::arg("text"))
      .def("set_watch", &watch,
           "Set a callback for long waits, called with the seconds waited; its exception ends the "
           "wait.",
           py::arg("callback"))
      .def("publish", &Group::publish, "Write this rank's notice.", py::arg("notice"))
      .def("published", &Group::published, "Read a rank's notice; None while it is being written.",
           py::arg("rank"))
      .def("position_of", &Group::position_of, "A rank's position at its last long wait.",
           py::arg("rank"))
      .def("is_behind", &Group::is_behind, "Whether a rank has posted fewer rounds.",
           py::arg("rank"))
      .def("abort", &Group::abort, "Make the group unusable on all ranks.", py::arg("reason"))
      .def("exchange_bytes", &exchange_bytes, "The bytes of every rank, all of one length.",
           py::arg("local"))
      .def(
          "exchange",
          [](Group& group, const Span& local, int64_t bytes, const Span& all) {
            exchange(group, local.of_size(bytes, "exchange: this rank's tensor"), bytes,
                     all.of_size(bytes * group.size(), "exchange: the tensor of all ranks"));
          },
          "`bytes` bytes of every rank, one after the other, in `all`.", py::arg("local"),
          py::arg("bytes"), py::arg("all"), NoGil())
      .def(
          "all_gather",
          [](Group& group, const GatherPlan& plan, const Span& shard,
             const std::vector<Span>& fulls) {
            const int64_t needed = shard_bytes(plan, group.rank());
            all_gather(group, plan, shard.of_size(needed, "all_gather: the shard"),
                       memory_of(fulls, plan.box_plan().full_bytes, "all_gather: a full tensor"));
          },
          "The full tensor in each of `fulls`.", py::arg("plan"), py::arg("shard"),
          py::arg("fulls"), NoGil())
      .def("gather_at_once", &gather_headers,
           "The headers of all ranks, and, if they are equal but for these bytes, the full tensor "
           "in each of `fulls`: in one round.",
           py::arg("header"), py::arg("may_differ"), py::arg("plan"), py::arg("places"),
           py::arg("shard"), py::arg("fulls"))
      .def("all_gather_views", &all_gather_views,
           "As all_gather, and `number` DLPack capsules of full tensors more, in memory that ranks "
           "share until they write to it.",
           py::arg("plan"), py::arg("shard"), py::arg("fulls"), py::arg("number"), py::arg("sizes"),
           py::arg("code"), py::arg("bits"))
      .def("gather_to_first", &gather_tuples_to_first,
           "Of each (plan, ranks that hold its shards, shard, full): the full tensor on rank 0.",
           py::arg("tensors"))
      .def(
          "open_gather",
          [](Group& group, const std::vector<OwningGather::Tuple>& tensors) {
            return std::make_unique<OwningGather>(group, tensors);
          },
          "gather_to_first in two halves, of (plan, ranks that hold its shards, full) of each.",
          py::keep_alive<0, 1>(), py::arg("tensors"))
      .def(
          "scatter_from_first",
          [](Group& group, const GatherPlan& plan, const Span& full, const Span& shard) {
            const int64_t needed = shard_bytes(plan, group.rank());
            scatter_from_first(
                group, plan,
                full.of_size(full_bytes(group, plan), "scatter_from_first: the full tensor"),
                shard.of_size(needed, "scatter_from_first: the shard"));
          },
          "This rank's shard of rank 0's full tensor.", py::arg("plan"), py::arg("full"),
          py::arg("shard"), NoGil())
      .def(
          "broadcast",
          [](Group& group, const Span& from, int64_t bytes, const Span& to) {
            const bool is_first = group.rank() == 0;
            broadcast(group, from.of_size(is_first ? bytes : -1, "broadcast: the source"), bytes,
                      to.of_size(is_first ? -1 : bytes, "broadcast: the target"));
          },
          "Rank 0's bytes in `to`.", py::arg("source"), py::arg("bytes"), py::arg("to"), NoGil());

  py::class_<OwningGather>(m, "OpenGather", "A gather that has begun and not ended.")
      .def_property_readonly(
          "targets", &OwningGather::targets,
          "Of each tensor: (full, segment, bytes of the segment), addresses in this process; full "
          "is 0 where this rank's shard, if it has one, must be passed to `end`.")
      .def("end", &OwningGather::end,
           "Move the shards; None where there is none, or it was written to its target.",
           py::arg("shards"), NoGil());

  m.def(
      "split_into",
      [](const GatherPlan& plan, int64_t rank, const Span& full, const Span& shard) {
        std::vector<char*> shards(plan.box_plan().shard_bytes.size(), nullptr);
        const int64_t needed = shard_bytes(plan, rank);
        shards[rank] = shard.of_size(needed, "split_into: the shard");
        const char* const from =
            full.of_size(plan.box_plan().full_bytes, "split_into: the full tensor");
        split_boxes(plan.box_plan().boxes, from, shards);
      },
      "One rank's shard out of a full tensor.", py::arg("plan"), py::arg("rank"), py::arg("full"),
      py::arg("shard"), NoGil());
}

}  // namespace flex_model
