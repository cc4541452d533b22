#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string_view>
#include <utility>

#include "dispatcher.h"
#include "module_walk.h"
#include "ops/hash_bytes.h"
#include "shared_memory/span.h"

namespace flex_model {
namespace {

// A plain C function bound to the site: cheaper to call than a pybind11 method, and `copy.deepcopy`
// leaves it alone. The capsule keeps the site alive; after `restore()` the site has no active hook
// and returns at once.
constexpr char kSiteCapsule[] = "flex_model.Site";

PyObject* call_site(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] {
    if (count != 2) throw_error(PyExc_TypeError, "a site is called with (module, tree)");
    auto* site = static_cast<std::shared_ptr<Site>*>(PyCapsule_GetPointer(capsule, kSiteCapsule));
    throw_if(site == nullptr);
    const std::shared_ptr<Site> alive = *site;
    return alive->run(arguments[0], arguments[1]);
  });
}

PyMethodDef call_site_definition = {
    "run_site", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_site)),
    METH_FASTCALL, "(module, tree) -> tree: run the active hooks of a site."};

py::object make_call(const std::shared_ptr<Site>& site) {
  const py::capsule capsule(new std::shared_ptr<Site>(site), kSiteCapsule, [](PyObject* self) {
    delete static_cast<std::shared_ptr<Site>*>(PyCapsule_GetPointer(self, kSiteCapsule));
  });
  return checked(PyCFunction_New(&call_site_definition, capsule.ptr()));
}

py::list registrations(const HookList& hooks) {
  py::list list;
  for (const auto& hook : hooks) list.append(hook->registration);
  return list;
}

}  // namespace

void bind_hooks(py::module_& m) {
  py::class_<Hook, std::shared_ptr<Hook>>(
      m, "Hook", "The part of a registered hook that the dispatcher needs.")
      .def(py::init<py::object, Py_ssize_t, py::object, std::optional<py::tuple>, bool, bool>(),
           py::arg("registration"), py::arg("unpack_idx"), py::arg("record_name"),
           py::arg("expected_shape"), py::arg("records_here"), py::arg("edits_here"))
      .def(
          "settle",
          [](Hook& hook, py::object function, py::object save_ctx, py::object modules) {
            hook.settled = {std::move(function), std::move(save_ctx), std::move(modules),
                            hook.registration.attr("description")};
          },
          "Note what its function, which draws no random numbers, is called with from now on.",
          py::arg("function"), py::arg("save_ctx"), py::arg("modules"))
      .def(
          "tag", [](Hook& hook, size_t group) { hook.groups.insert(group); }, "Add it to a group.",
          py::arg("group"))
      .def(
          "untag", [](Hook& hook, size_t group) { hook.groups.erase(group); },
          "Remove it from a group.", py::arg("group"))
      .def(
          "has", [](const Hook& hook, size_t group) { return hook.groups.count(group) > 0; },
          "Whether it is in a group.", py::arg("group"))
      .def_readonly(
          "replays", &Hook::replays,
          "Whether it runs whatever its groups, in a backward of a graph that was made with it.")
      .def(
          "set_replays", [](Hook& hook, bool replays) { hook.replays = replays; }, "Set `replays`.",
          py::arg("replays"));

  py::class_<EditMark, std::shared_ptr<EditMark>>(m, "EditMark",
                                                  "Which hook's editing function runs.")
      .def(py::init<>())
      .def_readonly("hook", &EditMark::hook, "Its description; empty: none runs.")
      .def("set", &EditMark::set, "Note that it begins to run; empty: that it has ended.",
           py::arg("hook"));

  py::class_<Site, std::shared_ptr<Site>>(m, "Site",
                                          "The hooks of one (module, kind) or of one parameter.")
      .def("add", &Site::add, "Add a hook, last in order.", py::arg("hook"))
      .def("remove", &Site::remove, "Remove a hook; nothing if it is not there.", py::arg("hook"))
      .def("refresh", &Site::refresh,
           "Recompute the active hooks; whether the site changed between some and none.")
      .def_property_readonly("hooks", [](const Site& site) { return registrations(site.hooks()); })
      .def_property_readonly(
          "active", [](const Site& site) { return registrations(*site.active()); },
          "Registrations of the active hooks, in order.")
      .def_property_readonly("last_run", &Site::last_run,
                             "The number of the last run in which torch called it.")
      .def_property_readonly("is_active", [](const Site& site) { return !site.active()->empty(); })
      .def_property_readonly("call", &make_call, "A C function (module, tree) -> tree.");

  m.def(
      "same_bytes",
      [](const Span& one, const Span& other) {
        return std::string_view(one.data, one.bytes) == std::string_view(other.data, other.bytes);
      },
      "Whether two tensors hold the same bytes. Many times faster than torch.equal.",
      py::arg("one"), py::arg("other"));

  m.def(
      "hash_of",
      [](const Span& tensor) {
        const char* const bytes = tensor.of_size(tensor.bytes, "hash_of: the tensor");
        return hash_bytes(reinterpret_cast<const unsigned char*>(bytes), tensor.bytes) & INT64_MAX;
      },
      "63 bits of a hash of a tensor's bytes, in order.", py::arg("tensor"),
      py::call_guard<py::gil_scoped_release>());

  m.def(
      "walk_modules", &walk_modules,
      "All modules under `root`, their code and the hooks of others on them, as objects to compare "
      "by identity: `before` itself where nothing has changed; digests of the flags (training, "
      "requires_grad) and of the other attributes.",
      py::arg("root"), py::arg("before"), py::arg("tensor_type"), py::arg("module_type"));

  py::class_<Dispatcher>(m, "Dispatcher", "Selects the hooks that run now.")
      .def(py::init<py::dict, const py::object&, const py::object&>(), py::arg("records"),
           py::arg("handlers"), py::arg("torch"))
      .def("close", &Dispatcher::close, "Detach all sites and drop the callbacks.")
      .def("add_site", &Dispatcher::add_site,
           "Make a site; `module_ref` is a weak reference, or None.", py::arg("module_ref"))
      .def("remove_site", &Dispatcher::remove_site, "Detach and drop a site.", py::arg("site"))
      .def("activate", &Dispatcher::activate,
           "Set the active groups; returns the sites that changed between active hooks and none.",
           py::arg("groups"), py::arg("complement"))
      .def("settle", &Dispatcher::settle,
           "Let the rest of the run call settled functions from here. `is_recomputed`: the run "
           "knows "
           "that a checkpoint may recompute what edits made.",
           py::arg("is_recomputed"))
      .def("number_run", &Dispatcher::number_run, "Number the runs that begin.", py::arg("number"))
      .def("set_in_run", &Dispatcher::set_in_run,
           "Set whether an outermost run has begun; returns the former value.", py::arg("in_run"));
}

}  // namespace flex_model
