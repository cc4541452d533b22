#include "pytree/tree.h"
#include "pytree/tree_spec.h"

namespace flex_model {
namespace {

// Plain C functions, since calls take half as long as pybind11's, and dominate the time here.

void check_count(const char* call, Py_ssize_t expected, Py_ssize_t got) {
  if (expected == got) return;
  throw_error(PyExc_TypeError, "expected %zd positional arguments, got %zd; call %s", expected, got,
              call);
}

Py_ssize_t as_index(PyObject* object) {
  const Py_ssize_t index = PyNumber_AsSsize_t(object, PyExc_IndexError);
  throw_if(index == -1 && PyErr_Occurred());
  return index;
}

PyObject* call_flatten(PyObject*, PyObject* tree) {
  return guarded([&] { return flatten(tree); });
}

PyObject* call_unflatten(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] {
    check_count("unflatten(leaves, spec)", 2, count);
    return unflatten(arguments[0], arguments[1]);
  });
}

PyObject* call_leaf_at(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] {
    check_count("leaf_at(tree, index)", 2, count);
    const Py_ssize_t index = as_index(arguments[1]);
    Py_ssize_t size = 0;
    py::object leaf = leaf_at(arguments[0], index, &size);
    if (!leaf) throw_index_error("leaf_at", size, index);
    return leaf;
  });
}

PyObject* call_replace_leaf(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] {
    check_count("replace_leaf(tree, index, leaf)", 3, count);
    return replace_leaf(arguments[0], as_index(arguments[1]), arguments[2]);
  });
}

PyObject* call_num_leaves(PyObject*, PyObject* tree) {
  return guarded([&] { return py::int_(num_leaves(tree)); });
}

template <typename Function>
PyCFunction cast(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

constexpr char kFlattenDoc[] = R"doc(flatten($module, tree, /)
--

Split ``tree`` into its tensors and a spec of the rest.

Containers are traversed depth first, dicts in insertion order; the module's docstring lists them.
Everything else (None, numbers, strings, unknown objects) is part of the spec, by identity.

Example::

    leaves, spec = pytree.flatten((hidden, {"loss": loss}, None))  # [hidden, loss], TreeSpec
    output = pytree.unflatten([edit(leaf) for leaf in leaves], spec)

Returns:
    ``(leaves, spec)``: a list of tensors and a :class:`TreeSpec`.

Raises:
    ValueError: A container contains itself.
    RecursionError: More than 1000 containers are nested in each other.
    TypeError: A registered flatten function does not return ``(children, context)``.
)doc";

constexpr char kUnflattenDoc[] = R"doc(unflatten($module, leaves, spec, /)
--

Build the tree of ``spec`` with these leaves: the inverse of :func:`flatten`.

Every container is new and has its own type; constants are the same objects. A leaf may be any
object, so a spec can also be filled with shapes or names.

Example::

    shapes = pytree.unflatten([leaf.shape for leaf in leaves], spec)

Raises:
    ValueError: The number of leaves is not ``spec.num_leaves``.
    TypeError: ``spec`` is not a :class:`TreeSpec`.
)doc";

constexpr char kLeafAtDoc[] = R"doc(leaf_at($module, tree, index, /)
--

Return the tensor at ``index``, counted depth first from 0. Later containers are not traversed.

Example::

    attention = pytree.leaf_at(output, 1)

Raises:
    IndexError: The tree has fewer tensors, or ``index`` is negative.
    ValueError, RecursionError, TypeError: As :func:`flatten`.
)doc";

constexpr char kReplaceLeafDoc[] = R"doc(replace_leaf($module, tree, index, leaf, /)
--

Return a tree like ``tree`` with the tensor at ``index`` replaced by ``leaf``.

Only the containers around it are rebuilt, each with its own type. Everything else, untouched
containers too, is the same object, and ``tree`` is not changed.

Example::

    output = pytree.replace_leaf(output, 1, attention * 2)

Raises:
    IndexError: The tree has fewer tensors, or ``index`` is negative.
    ValueError, RecursionError, TypeError: As :func:`flatten`.
)doc";

constexpr char kNumLeavesDoc[] = R"doc(num_leaves($module, tree, /)
--

Return the number of tensors in ``tree``.

Example::

    pytree.num_leaves((hidden, {"loss": loss}, None))  # 2

Raises:
    ValueError, RecursionError, TypeError: As :func:`flatten`.
)doc";

PyMethodDef functions[] = {
    {"flatten", call_flatten, METH_O, kFlattenDoc},
    {"unflatten", cast(call_unflatten), METH_FASTCALL, kUnflattenDoc},
    {"leaf_at", cast(call_leaf_at), METH_FASTCALL, kLeafAtDoc},
    {"replace_leaf", cast(call_replace_leaf), METH_FASTCALL, kReplaceLeafDoc},
    {"num_leaves", call_num_leaves, METH_O, kNumLeavesDoc},
};

}  // namespace

void bind_pytree(py::module_& m) {
  const py::str public_module("flex_model.pytree");
  for (PyMethodDef& function : functions) {
    m.add_object(function.ml_name,
                 checked(PyCFunction_NewEx(&function, nullptr, public_module.ptr())));
  }
  m.add_object("TreeSpec", tree_spec_type());

  m.def("set_leaf_type", &set_leaf_type,
        "Set the type whose instances, and subclasses', are leaves.", py::arg("type"));
  m.def("set_type_sources", &set_type_sources,
        "Set `describe(type)`, which names the attributes that are children, and torch's registry.",
        py::arg("describe"), py::arg("torch_registry"));
  m.def("register_container", &register_container, "Flatten this exact type with these functions.",
        py::arg("type"), py::arg("flatten"), py::arg("unflatten"));
  m.def("register_leaf", &register_leaf, "Count instances of this exact type as leaves.",
        py::arg("type"));
  m.def("unregister", &unregister_container, "Remove the registration of a type.", py::arg("type"));
  m.def("num_known_types", &num_known_types, "Return the number of cached types, which are alive.");
}

}  // namespace flex_model
