#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "gather_plan.h"

namespace py = pybind11;

namespace flex_model {
namespace {

GatherPlan make_plan(Sizes full_sizes, std::vector<Sizes> shard_sizes,
                     std::vector<std::tuple<int64_t, Sizes, Sizes, Sizes>> boxes,
                     int64_t element_bytes) {
  std::vector<ElementBox> list;
  for (auto& [rank, full_start, shard_start, sizes] : boxes) {
    list.push_back({rank, std::move(full_start), std::move(shard_start), std::move(sizes)});
  }
  return GatherPlan(std::move(full_sizes), std::move(shard_sizes), std::move(list), element_bytes);
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
          "code", [](const GatherPlan& plan) { return plan.box_plan().encode(); },
          "The encoded plan, an argument of the ops (int[]).");
}

}  // namespace flex_model
