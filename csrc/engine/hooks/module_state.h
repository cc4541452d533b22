// Hashes the plain state of modules: flags, numbers, texts and settings in their attributes, on
// which a forward may branch.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <unordered_set>

#include "python_objects.h"

namespace flex_model {

class StateHash {
 public:
  // `tensor_type`, `module_type`: torch's, of which only the type and the identity count.
  StateHash(PyObject* tensor_type, PyObject* module_type);

  // Adds a module's own attributes, except for those that `nn.Module` makes. Runs no code of the
  // attributes' classes. Modules of torch count only if they are layers: those around a model, such
  // as DDP, note there what they do in a forward.
  void add_module(PyObject* module, PyObject* dict);

  uint64_t value() const { return hash_; }

 private:
  void add(PyObject* value, int depth);
  bool add_number_or_text(PyObject* value);
  bool add_code_or_tensor(PyObject* value, int depth);
  void add_function(PyObject* function, int depth);
  bool add_container(PyObject* value, int depth);
  void add_object(PyObject* value, int depth);
  void add_buffer(PyObject* value);
  void add_dict(PyObject* dict, int depth);
  void mix(const void* pointer) { mix(reinterpret_cast<uintptr_t>(pointer)); }
  void mix(uint64_t number) {  // the upper half, too: a double may have no other bits
    hash_ = (hash_ ^ number ^ number >> 32) * 0x100000001b3ULL;
  }

  PyTypeObject* tensor_type_;
  PyTypeObject* module_type_;
  std::unordered_set<PyObject*> seen_;                 // containers and objects that were added
  std::unordered_map<PyTypeObject*, bool> is_around_;  // by type: whether it is around a model
  uint64_t hash_ = 0xcbf29ce484222325ULL;
};

}  // namespace flex_model
