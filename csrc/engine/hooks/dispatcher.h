// Selects the hooks of a site that run now, and runs read-only hooks without Python.
//
// A Site stands for one (module, kind) or one parameter; torch calls it, and it calls the active
// hooks in the order of their registration. With one process, a hook that only records runs here:
// it appends `detach().clone()` to the list of its name. All others are passed to the Python
// callback `run_hook`, which gathers, edits and scatters.
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
  bool records_here;  // only records and needs no gather: runs without Python
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
  // reference to the tree that the model continues with (the same object if no hook edited it), or
  // nullptr with a Python error.
  PyObject* run(PyObject* module, PyObject* tree);

 private:
  // 1: recorded, 0: not possible here, -1: Python error.
  int record(const Hook& hook, PyObject* tree);

  Dispatcher* dispatcher_;  // nullptr once detached
  py::object
      module_;  // a weak reference, or None: a copied module calls the hooks it was copied with
  HookList hooks_;
  std::shared_ptr<const HookList> active_ = std::make_shared<const HookList>();
};

class Dispatcher {
 public:
  Dispatcher(py::dict records, py::object run_hook, py::type tensor_type,
             py::function current_graph_task)
      : records(std::move(records)),
        run_hook(std::move(run_hook)),
        tensor_type(std::move(tensor_type)),
        current_graph_task(std::move(current_graph_task)) {}

  ~Dispatcher() { close(); }
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  // Detaches all sites and drops the callback, which may refer to the owner of this dispatcher.
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
  py::type tensor_type;  // torch.Tensor: only this exact type is recorded here
  py::function
      current_graph_task;  // -1 outside of backward; inside, a forward hook is a recomputation
  bool in_run = false;     // whether an outermost run has begun

 private:
  std::vector<std::shared_ptr<Site>> sites_;
  GroupSet active_;
  bool complement_ = false;
};

}  // namespace flex_model
