#include <pybind11/pybind11.h>

#include "turn.h"

namespace py = pybind11;

namespace flex_model {
namespace {

// Without Python's lock, which the other thread needs to run: to be woken twice costs twice.
bool give_and_take(Turn* other, Turn& mine, double seconds) {
  {
    py::gil_scoped_release unlocked;
    if (other != nullptr) other->give();
    if (mine.take(seconds)) return true;
  }
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  return false;
}

}  // namespace

void bind_turns(py::module_& m) {
  m.def(
      "current_core", [] { return sched_getcpu(); }, "The core that this thread runs on now.");
  py::class_<Turn>(m, "Turn", "A thread's turn, among threads of which one runs at a time.")
      .def(py::init<>())
      .def("give", &Turn::give, "It is its turn now.")
      .def(
          "take", [](Turn& mine, double seconds) { return give_and_take(nullptr, mine, seconds); },
          "Wait until it is given, for `seconds` at most: whether it was.", py::arg("seconds"))
      .def(
          "give_and_take",
          [](Turn& other, Turn& mine, double seconds) {
            return give_and_take(&other, mine, seconds);
          },
          "Give it to its thread, and take `mine`.", py::arg("mine"), py::arg("seconds"));
}

}  // namespace flex_model
