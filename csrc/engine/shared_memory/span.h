// The memory of a tensor that Python passes. It must be a contiguous CPU tensor of torch's own
// class. Its Python attributes are read, so that nothing here depends on torch's headers.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

namespace flex_model {

struct Span {
  char* data = nullptr;
  int64_t bytes = 0;

  // Reads a tensor's memory; None gives an empty span, on a rank without that tensor.
  // py::type_error for any other object.
  static Span of(const pybind11::object& tensor);

  // The memory; py::value_error unless it has `needed` bytes. Below 0: it is not used.
  char* of_size(int64_t needed, const char* what) const {
    if (needed < 0 || (bytes == needed && (data != nullptr || needed == 0))) return data;
    const std::string got =
        data == nullptr ? "no memory" : "a tensor of " + std::to_string(bytes) + " bytes";
    throw pybind11::value_error(std::string(what) + " must have " + std::to_string(needed) +
                                " bytes, got " + got);
  }
};

}  // namespace flex_model

namespace pybind11::detail {

template <>
struct type_caster<flex_model::Span> {
  PYBIND11_TYPE_CASTER(flex_model::Span, const_name("Tensor | None"));

  bool load(handle source, bool) {
    value = flex_model::Span::of(reinterpret_borrow<object>(source));
    return true;
  }
};

}  // namespace pybind11::detail
