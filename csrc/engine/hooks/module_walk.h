// Lists a model's modules, their code and the hooks of others on them, before each forward. In C++,
// because every forward pays for it per module.
#pragma once

#include <pybind11/pybind11.h>

namespace flex_model {

struct ModuleWalk {
  // Objects to compare by identity: they differ where a module, its `forward` or a hook on it was
  // replaced. Hooks of this library are left out.
  pybind11::list objects;
  // A hash of the training flags of all modules, in order; the same on every rank.
  uint64_t training;
  // A hash of the modules' other attributes, see `StateHash`; of this process.
  uint64_t state;
};

// Walks all modules under `root`, each once. If the objects equal those of `before`, the result has
// `before` itself, so that `is` shows whether anything changed. `tensor_type`, `module_type`:
// torch's.
ModuleWalk walk_modules(pybind11::handle root, const pybind11::list& before,
                        pybind11::handle tensor_type, pybind11::handle module_type);

}  // namespace flex_model
