#include "span.h"

#include "hooks/torch_access.h"

namespace flex_model {
namespace {

// The torch classes whose tensors have plain memory; live as long as the process.
struct PlainTypes {
  py::object tensor = py::module_::import("torch").attr("Tensor");
  py::object parameter = py::module_::import("torch").attr("nn").attr("Parameter");
};

const PlainTypes& plain_types() {
  static const PlainTypes* const kTypes = new PlainTypes;  // Python may be gone before
  return *kTypes;
}

}  // namespace

Span Span::of(const py::object& tensor) {
  if (tensor.is_none()) return {};
  const Names& of = names();
  const py::handle type = py::type::handle_of(tensor);
  const bool is_plain = (type.is(plain_types().tensor) || type.is(plain_types().parameter)) &&
                        is_true(of.is_cpu.of(tensor)) && is_true(of.is_contiguous.call(tensor)) &&
                        !is_true(of.is_conj.call(tensor)) && !is_true(of.is_neg.call(tensor));
  if (!is_plain) {
    throw py::type_error("expected a contiguous CPU tensor of the class Tensor, got a " +
                         std::string(py::str(type.attr("__name__"))) +
                         "; see flex_model.distributed.plain");
  }
  const auto address = of.data_ptr.call(tensor).cast<uintptr_t>();
  return {reinterpret_cast<char*>(address), of.nbytes.of(tensor).cast<int64_t>()};
}

}  // namespace flex_model
