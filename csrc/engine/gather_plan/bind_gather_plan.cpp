#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "gather_plan.h"

namespace py = pybind11;

namespace flex_model {
namespace {

struct Bytes {
  char* data;
  int64_t size;
};

Bytes bytes_of(const py::buffer_info& info) {
  return {static_cast<char*>(info.ptr), info.size * info.itemsize};
}

void check_bytes(const char* what, int64_t got, int64_t expected) {
  if (got != expected) {
    throw py::value_error(std::string("GatherPlan: ") + what + " must have " +
                          std::to_string(expected) + " bytes, got " + std::to_string(got));
  }
}

GatherPlan make_plan(Sizes full_sizes, std::vector<Sizes> shard_sizes,
                     std::vector<std::tuple<int64_t, Sizes, Sizes, Sizes>> boxes,
                     int64_t element_bytes) {
  std::vector<ElementBox> list;
  for (auto& [rank, full_start, shard_start, sizes] : boxes) {
    list.push_back({rank, std::move(full_start), std::move(shard_start), std::move(sizes)});
  }
  return GatherPlan(std::move(full_sizes), std::move(shard_sizes), std::move(list), element_bytes);
}

py::bytes assemble(const GatherPlan& plan, const std::vector<py::buffer>& shards) {
  const BoxPlan& box_plan = plan.box_plan();
  check_bytes("the list of shards (as many as ranks)", shards.size(), box_plan.shard_bytes.size());
  std::vector<py::buffer_info> infos;
  for (size_t rank = 0; rank < shards.size(); ++rank) {
    infos.push_back(shards[rank].request());
    check_bytes("a shard", bytes_of(infos.back()).size, box_plan.shard_bytes[rank]);
  }
  std::string full(box_plan.full_bytes, '\0');
  for (const Box& box : box_plan.boxes)
    assemble_box(box, bytes_of(infos[box.rank]).data, full.data());
  return py::bytes(full);
}

py::bytes split(const GatherPlan& plan, const py::buffer& full, int64_t rank) {
  const BoxPlan& box_plan = plan.box_plan();
  const py::buffer_info info = full.request();
  check_bytes("the full tensor", bytes_of(info).size, box_plan.full_bytes);
  if (rank < 0 || rank >= static_cast<int64_t>(box_plan.shard_bytes.size()))
    throw py::index_error("GatherPlan: the plan has no such rank");
  std::string shard(box_plan.shard_bytes[rank], '\0');
  for (const Box& box : box_plan.boxes) {
    if (box.rank == rank) split_box(box, bytes_of(info).data, shard.data());
  }
  return py::bytes(shard);
}

}  // namespace

void bind_gather_plan(py::module_& m) {
  py::class_<GatherPlan>(m, "GatherPlan",
                         "Where the bytes of each rank's shard lie in the full tensor.")
      .def(py::init(&make_plan),
           "`boxes` are (rank, full_start, shard_start, sizes), in elements; ValueError if they "
           "do not tile both sides.",
           py::arg("full_sizes"), py::arg("shard_sizes"), py::arg("boxes"),
           py::arg("element_bytes"))
      .def_property_readonly("full_sizes", &GatherPlan::full_sizes, "Sizes of the full tensor.")
      .def_property_readonly("shard_sizes", &GatherPlan::shard_sizes, "Sizes of each rank's shard.")
      .def_property_readonly(
          "full_bytes", [](const GatherPlan& plan) { return plan.box_plan().full_bytes; },
          "Bytes of the full tensor.")
      .def_property_readonly(
          "shard_bytes", [](const GatherPlan& plan) { return plan.box_plan().shard_bytes; },
          "Bytes of each rank's shard.")
      .def_property_readonly(
          "num_boxes", [](const GatherPlan& plan) { return plan.box_plan().boxes.size(); },
          "The number of strided copies.")
      .def_property_readonly(
          "code", [](const GatherPlan& plan) { return plan.box_plan().encode(); },
          "The encoded plan, an argument of the ops (int[]).")
      .def("assemble", &assemble,
           "Assemble the bytes of the full tensor from buffers of all shards.", py::arg("shards"))
      .def("split", &split,
           "Extract the bytes of one rank's shard from a buffer of the full tensor.",
           py::arg("full"), py::arg("rank"));
}

}  // namespace flex_model
