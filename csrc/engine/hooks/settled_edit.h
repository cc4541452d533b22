// An edit in one process in the steady state: nothing is seeded, and nothing is checked but what
// may change from call to call. Whatever is unusual is left to the Python handlers.
#pragma once

#include "dispatcher.h"

namespace flex_model {

// Calls the hook's function on `copy`, a copy of `leaf` and its only handle. Returns the tensor
// that the model continues with; None: its own. Drops the copy, but where it still has the values
// of `leaf` and no one else has it. Throws py::error_already_set.
py::object run_settled(const Dispatcher& dispatcher, const Hook& hook, PyObject* module,
                       const py::object& leaf, bool is_on_cpu, py::object& copy);

}  // namespace flex_model
