// Selects the hooks of a site that run now, and runs those that need no gather.
//
// A Site stands for one (module, kind) or one parameter; torch calls it, and it calls the active
// hooks in the order of their registration. With one process, most hooks run here: one that records
// appends `detach().clone()` to the list of its name, and one that edits passes a copy to the
// Python callback `edit`. All others are passed to the Python callback `run_hook`, which gathers,
// edits and scatters.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "group_set.h"

namespace flex_model {

namespace py = pybind11;

struct Hook {
  py::object registration;  // the argument of run_hook: flex_model.hooks.registration.Registration
  Py_ssize_t unpack_idx;
  py::object record_name;
  bool records_here;  // its tensor is whole on this process: it is recorded here,
  bool edits_here;    // and passed to `edit` from here
  GroupSet groups;
  bool replays = false;  // runs in a backward of a graph that was made with it, whatever its groups
};

using HookList = std::vector<std::shared_ptr<Hook>>;

class Dispatcher;

class Site {
 public:
  Site(Dispatcher* dispatcher, py::object module)
      : dispatcher_(dispatcher), module_(std::move(module)) {}

  void add(std::shared_ptr<Hook> hook);
  void remove(const std::shared_ptr<Hook>& hook);
  // Recomputes the active hooks; true if the site went from none to some or from some to none.
  bool refresh();
  // A snapshot: hooks may be added and removed while a caller iterates.
  std::shared_ptr<const HookList> active() const { return active_; }
  const HookList& hooks() const { return hooks_; }

  // Detaches the site from its dispatcher: its hooks no longer run, even if others refer to it.
  void detach();

  // Runs the active hooks on one tree of tensors (an output, or `(args, kwargs)`). Returns a new
  // reference to the tree that the model continues with (the same object if no hook edited it);
  // throws py::error_already_set.
  PyObject* run(PyObject* module, PyObject* tree);

 private:
  // Records the hook's tensor of the tree, and has it edited. Returns false where that is not
  // possible here; throws py::error_already_set.
  bool run_here(const Hook& hook, PyObject* module, py::object& tree);
  bool is_plain(PyObject* leaf, bool edits) const;

  Dispatcher* dispatcher_;  // nullptr once detached
  py::object
      module_;  // a weak reference, or None: a copied module calls the hooks it was copied with
  HookList hooks_;
  std::shared_ptr<const HookList> active_ = std::make_shared<const HookList>();
};

class Dispatcher {
 public:
  Dispatcher(py::dict records, py::object run_hook, py::object edit, py::type tensor_type,
             py::object strided, py::function current_graph_task, py::function is_inference_mode)
      : records(std::move(records)),
        run_hook(std::move(run_hook)),
        edit(std::move(edit)),
        tensor_type(std::move(tensor_type)),
        strided(std::move(strided)),
        current_graph_task(std::move(current_graph_task)),
        is_inference_mode(std::move(is_inference_mode)) {}

  ~Dispatcher() { close(); }
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  // Detaches all sites and drops the callbacks, which may refer to the owner of this dispatcher.
  void close();
  std::shared_ptr<Site> add_site(py::object module_ref);
  void remove_site(const std::shared_ptr<Site>& site);
  // Sets the groups whose hooks run (with `complement`: hooks in none of them run). Returns the
  // sites that changed between having active hooks and having none.
  std::vector<std::shared_ptr<Site>> activate(const std::vector<size_t>& groups, bool complement);
  bool is_active(const Hook& hook) const {
    return hook.replays || hook.groups.overlaps(active_) != complement_;
  }
  // Deletes the record lists of the active hooks, at the start of an outermost run.
  void clear_records();

  py::dict records;      // the user's output_ptr
  py::object run_hook;   // (registration, module, tree) -> tree
  py::object edit;       // (registration, module, tensor, copy) -> replacement or None
  py::type tensor_type;  // torch.Tensor: only this exact type is served here
  py::object strided;    // torch.strided: only tensors of this layout are edited here
  py::function
      current_graph_task;  // -1 outside of backward; inside, a forward hook is a recomputation
  py::function is_inference_mode;
  bool in_run = false;  // whether an outermost run has begun

 private:
  std::vector<std::shared_ptr<Site>> sites_;
  GroupSet active_;
  bool complement_ = false;
};

}  // namespace flex_model
