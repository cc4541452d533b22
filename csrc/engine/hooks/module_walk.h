// What a model is made of, seen anew before each forward: its modules, their code and the hooks of
// others on them. In C++, since every forward pays for it, per module.
#pragma once

#include <pybind11/pybind11.h>

namespace flex_model {

struct ModuleWalk {
  // Objects to be compared by identity: they are others where a module, its `forward` or a hook on
  // it is another. Hooks of this library are left out.
  pybind11::list objects;
  // Stands for the training flags of all modules, in order; the same on every rank.
  uint64_t training;
};

// Walks all modules under `root`, each once. Where the objects are those of `before`, that list is
// the result's, so that `is` tells whether anything has changed.
ModuleWalk walk_modules(pybind11::handle root, const pybind11::list& before);

}  // namespace flex_model
