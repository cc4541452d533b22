// flex_model._C: Python objects and state. One line per component; each binds itself beside its
// code.
#include <pybind11/pybind11.h>

namespace flex_model {
void bind_pytree(pybind11::module_& m);
void bind_gather_plan(pybind11::module_& m);
void bind_hooks(pybind11::module_& m);
void bind_interrupts(pybind11::module_& m);
void bind_shared_memory(pybind11::module_& m);
void bind_native_stack(pybind11::module_& m);
}  // namespace flex_model

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled half of flex_model. Tensor ops live in torch.ops.flex_model.";
  flex_model::bind_pytree(m);
  flex_model::bind_gather_plan(m);
  flex_model::bind_hooks(m);
  flex_model::bind_interrupts(m);
  flex_model::bind_shared_memory(m);
  flex_model::bind_native_stack(m);
}
