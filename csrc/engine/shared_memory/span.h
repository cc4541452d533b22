// Memory of this process that Python hands over: as (address, bytes), or as an address alone.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

namespace flex_model {

struct Span {
  char* data = nullptr;
  int64_t bytes = -1;  // -1: not told

  // py::value_error if `needed` bytes can't be there.
  void check(int64_t needed, const char* what) const {
    if (needed <= 0 || (data != nullptr && (bytes < 0 || bytes >= needed))) return;
    const std::string got =
        data == nullptr ? "address 0" : "a buffer of " + std::to_string(bytes) + " bytes";
    throw pybind11::value_error(std::string(what) + " must have " + std::to_string(needed) +
                                " bytes, got " + got +
                                "; pass the address and size of a contiguous plain CPU tensor");
  }
};

}  // namespace flex_model

namespace pybind11::detail {

template <>
struct type_caster<flex_model::Span> {
  PYBIND11_TYPE_CASTER(flex_model::Span, const_name("int | tuple[int, int]"));

  bool load(handle source, bool) {
    handle address = source;
    if (PyTuple_Check(source.ptr())) {
      if (PyTuple_GET_SIZE(source.ptr()) != 2) return false;
      address = PyTuple_GET_ITEM(source.ptr(), 0);
      value.bytes = PyLong_AsLongLong(PyTuple_GET_ITEM(source.ptr(), 1));
    }
    if (!PyLong_Check(address.ptr())) return false;
    value.data = static_cast<char*>(PyLong_AsVoidPtr(address.ptr()));
    if (PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
    return true;
  }
};

}  // namespace pybind11::detail
