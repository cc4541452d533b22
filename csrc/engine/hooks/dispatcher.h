// Selects the hooks of a site that run now, and runs those that are settled.
//
// A Site stands for one (module, kind) or one parameter; torch calls it, and it calls the active
// hooks in the order of their registration. With one process, most hooks run here: one that records
// appends `detach().clone()` to the list of its name, and one that edits passes a copy to the
// handlers' `edit_whole`, or, once that has settled what the function may be passed, to the
// function itself. On several ranks, a function that has settled is called from here, on the tensor
// that the handlers' `gather_settled` gathers where no rank has anything unusual to do. All others
// are passed to the handlers' `forward`, which gathers, edits and scatters.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "torch_access.h"

namespace flex_model {

// What an editing function is called with, after a call of it that drew no random numbers.
struct SettledEdit {
  py::object function, save_ctx, modules, description;
};

struct Hook {
  py::object registration;  // flex_model.hooks.registration.Registration
  Py_ssize_t unpack_idx;
  py::object record_name;
  std::optional<py::tuple> expected_shape;  // sizes and None
  bool records_here;  // its tensor is whole on this process: it is recorded here,
  bool edits_here;    // and edited from here
  std::set<size_t> groups{};
  bool replays = false;  // runs in a backward of a graph that was made with it, whatever its groups
  SettledEdit settled{};
};

using HookList = std::vector<std::shared_ptr<Hook>>;

class Dispatcher;

// Which hook's editing function runs: it must neither transfer anything nor run the model.
struct EditMark {
  py::object hook = py::str();
  bool is_set = false;
  void set(py::object of) {
    is_set = py::len(of) > 0;
    hook = std::move(of);
  }
};

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
  // The number of the last run in which torch called it.
  size_t last_run() const { return last_run_; }

  // Detaches the site from its dispatcher: its hooks no longer run, even if others refer to it.
  void detach();

  // Runs the active hooks on one tree of tensors (an output, or `(args, kwargs)`). Returns the tree
  // that the model continues with (the same object if no hook edited it); throws
  // py::error_already_set.
  py::object run(PyObject* module, PyObject* tree);

 private:
  // Records the hook's tensor of the tree, and has it edited. Returns false where that is not
  // possible here; throws py::error_already_set.
  bool run_here(const Hook& hook, PyObject* module, py::object& tree);
  // Has the hook's tensor edited, of which other ranks hold parts. Returns false as run_here does.
  bool run_gathered(const Hook& hook, PyObject* module, py::object& tree);
  // The hook's tensor, if it may be served here: in a forward, of a plain class; else none. Throws
  // py::error_already_set.
  py::object plain_leaf(const Hook& hook, const py::object& tree, bool is_inference) const;
  py::object record_list(const Hook& hook) const;  // made where there is none

  Dispatcher* dispatcher_;  // nullptr once detached
  py::object
      module_;  // a weak reference, or None: a copied module calls the hooks it was copied with
  HookList hooks_;
  size_t last_run_ = 0;
  std::shared_ptr<const HookList> active_ = std::make_shared<const HookList>();
};

// The Python half: flex_model.hooks.handlers.HookHandlers.
struct Handlers {
  py::object handlers;
  // (registration, module, tree) -> tree
  py::object forward = handlers.attr("forward");
  // (registration, module, tensor, copy) -> replacement or None
  py::object edit_whole = handlers.attr("edit_whole");
  // (registration, tensor, copy, before, result, is_kept) -> likewise
  py::object finish_edit = handlers.attr("finish_edit");
  py::object hook_failed = handlers.attr("hook_failed");  // (registration, error): raises
  // (registration): raises, or fails on all ranks
  py::object edit_drew = handlers.attr("edit_drew");
  // (registration, leaf) -> None, or see Site::run_gathered
  py::object gather_settled = handlers.attr("gather_settled");
  std::shared_ptr<EditMark> edit =
      handlers.attr("communicator").attr("edit").cast<std::shared_ptr<EditMark>>();
};

class Dispatcher {
 public:
  Dispatcher(py::dict records, const py::object& handlers, const py::object& torch)
      : records(std::move(records)), handlers(new Handlers{handlers}), torch{torch} {}

  ~Dispatcher() { close(); }
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  // Detaches all sites and drops the handlers, which may refer to the owner of this dispatcher.
  void close();
  std::shared_ptr<Site> add_site(py::object module_ref);
  void remove_site(const std::shared_ptr<Site>& site);
  // Sets the groups whose hooks run (with `complement`: hooks in none of them run). Returns the
  // sites that changed between having active hooks and having none.
  std::vector<std::shared_ptr<Site>> activate(const std::vector<size_t>& groups, bool complement);
  bool is_active(const Hook& hook) const {
    const bool is_in_one = std::any_of(hook.groups.begin(), hook.groups.end(),
                                       [this](size_t group) { return active_.count(group) > 0; });
    return hook.replays || is_in_one != complement_;
  }
  void number_run(size_t number) { run_number = number; }
  // Begins or ends an outermost run, or the turn of a batch of one; returns whether it was in one.
  bool set_in_run(bool in_run);
  // Lets the rest of the run call settled functions from here. `is_recomputed`: the run knows that
  // a checkpoint may recompute what edits made.
  void settle(bool is_recomputed);
  // Whether the hook's function may be called from here now.
  bool is_settled(const Hook& hook) const;
  bool in_run() const { return in_run_; }

  py::dict records;  // the user's output_ptr, of a subclass or not
  std::shared_ptr<const Handlers> handlers;
  const TorchAccess torch;
  size_t run_number = 0;

 private:
  std::vector<std::shared_ptr<Site>> sites_;
  std::set<size_t> active_;
  bool complement_ = false;
  bool in_run_ = false;
  unsigned long settled_thread_ = 0;  // that of the run; 0: not settled
  bool is_recomputed_ = false;
};

}  // namespace flex_model
