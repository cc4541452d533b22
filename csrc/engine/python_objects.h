// References to Python objects, and their errors: in C++ a failed call throws
// py::error_already_set.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <new>

namespace flex_model {

namespace py = pybind11;

inline py::object steal(PyObject* object) { return py::reinterpret_steal<py::object>(object); }
inline py::object borrow(PyObject* object) { return py::reinterpret_borrow<py::object>(object); }

// Returns a new reference, or throws the Python error that is set.
inline py::object checked(PyObject* object) {
  if (object == nullptr) throw py::error_already_set();
  return steal(object);
}

// Throws the Python error that is set, if `failed`.
inline void throw_if(bool failed) {
  if (failed) throw py::error_already_set();
}

// Throws a Python error; the format is that of PyErr_Format.
template <typename... Arguments>
[[noreturn]] void throw_error(PyObject* type, const char* format, Arguments... arguments) {
  PyErr_Format(type, format, arguments...);
  throw py::error_already_set();
}

// Whether a weak reference is to this object.
inline bool refers_to(PyObject* reference, PyObject* object) {
#if PY_VERSION_HEX >= 0x030d0000
  PyObject* found = nullptr;
  throw_if(PyWeakref_GetRef(reference, &found) < 0);
  return steal(found).ptr() == object;
#else
  return PyWeakref_GetObject(reference) == object;
#endif
}

// Calls a function that returns a py::object, for a C function that Python calls: what is thrown
// becomes Python's error.
template <typename Function>
PyObject* guarded(const Function& function) {
  try {
    return function().release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace flex_model
