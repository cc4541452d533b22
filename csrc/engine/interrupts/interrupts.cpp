// Ctrl-C where Python code can't handle it: at the first line of a function that would catch it,
// and where an object is deleted.
#include <pybind11/pybind11.h>

#include <optional>
#include <utility>

namespace py = pybind11;

namespace flex_model {
namespace {

// Has the main thread raise an error at its next bytecode, as it raises those of signal handlers.
void raise_later(py::error_already_set& error) {
  py::object value = error.value();
  value.attr("__traceback__") = py::none();  // the error is that of the code that it is raised in
  const auto raise = [](void* pending) {
    const auto value = py::reinterpret_steal<py::object>(static_cast<PyObject*>(pending));
    PyErr_SetObject(py::type::handle_of(value).ptr(), value.ptr());
    return -1;
  };
  if (Py_AddPendingCall(raise, value.ptr()) == 0) {
    value.release();
  } else {  // Python's queue is full
    error.discard_as_unraisable("a Finalizer");
  }
}

// Calls a function when it is deleted. Python ignores exceptions there, as in `__del__` and in the
// callbacks of weak references, also a Ctrl-C. Here, what a signal handler raises is raised later,
// in the main thread.
class Finalizer {
 public:
  explicit Finalizer(py::function callback) : callback_(std::move(callback)) {}
  Finalizer(const Finalizer&) = delete;
  Finalizer& operator=(const Finalizer&) = delete;

  ~Finalizer() {
    if (!callback_ || !Py_IsInitialized()) return;  // the interpreter exits: its modules are gone
    const py::error_scope outer;  // an exception may be the reason why the owner was deleted
    std::optional<py::error_already_set> raised;
    // Handle signals that came during C code, else the function's first line would raise them.
    if (PyErr_CheckSignals() != 0) raised.emplace();
    try {
      callback_();
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) {
        raised = error;
      } else {
        error.discard_as_unraisable(callback_);
      }
    }
    if (raised) raise_later(*raised);
  }

  void cancel() { callback_ = py::function(); }

  void call() {
    const py::object callback = std::exchange(callback_, py::object());
    if (callback) callback();
  }

 private:
  py::object callback_;
};

// Python may raise KeyboardInterrupt at the first line of a function, where that function can't
// catch it; so it is caught here, outside of Python.
py::object make_watched(const py::function& act, const py::function& if_raised) {
  return py::cpp_function([act, if_raised](const py::args&) {
    try {
      act();
    } catch (py::error_already_set&) {
      if_raised();
      throw;
    }
  });
}

}  // namespace

void bind_interrupts(py::module_& m) {
  py::class_<Finalizer>(
      m, "Finalizer",
      "Calls a function when it is deleted. A Ctrl-C in the function is raised after it, in the "
      "main thread; other errors are reported as those of `__del__`. The function must not refer "
      "to an owner of this object: no garbage collector sees that cycle. It is not called while "
      "the interpreter exits.")
      .def(py::init<py::function>(), py::arg("callback"))
      .def("call", &Finalizer::call, "Call the function now, unless it was called or cancelled.")
      .def("cancel", &Finalizer::cancel, "Never call the function.");

  m.def(
      "watched", &make_watched,
      "A callable that calls `act`, ignoring its arguments, and `if_raised` when that raises, also "
      "by a Ctrl-C at its first line.",
      py::arg("act"), py::arg("if_raised"));
}

}  // namespace flex_model
