// Lists a model's modules, their code and the hooks of others on them, before each forward. In C++,
// because every forward pays for it per module.
#pragma once

#include <cstdint>
#include <tuple>

#include "python_objects.h"

namespace flex_model {

// Walks all modules under `root`, each once. Returns
//   objects to compare by identity: they differ where a module, its `forward` or a hook on it was
//     replaced. Hooks of this library are left out. If they equal those of `before`, it is `before`
//     itself, so that `is` shows whether anything changed
//   a hash of the flags of all modules, in order: `training`, and each parameter's `requires_grad`
//     (which tensors have gradients); the same on every rank
//   a hash of the modules' other attributes, see `StateHash`; of this process
// `tensor_type`, `module_type`: torch's.
std::tuple<py::list, uint64_t, uint64_t> walk_modules(const py::object& root,
                                                      const py::list& before,
                                                      const py::type& tensor_type,
                                                      const py::type& module_type);

}  // namespace flex_model
