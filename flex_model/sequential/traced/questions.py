"""Questions that traced code asks in Python about values: a truth, a number, a length, a class,
whether it is None. The sample's answer leads the trace, so a graph that was traced with it holds
for inputs with the same answer only: each is a node that asks again when the graph runs.

A proxy sees most questions. It does not see ``is``, and can't answer ``len()`` with a proxy: in the
functions that are traced, these are calls of functions here.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from flex_model.sequential.traced.trace_check import trace_error

IS, LEN = "_flex_model_is", "_flex_model_len"
_PLAIN = (bool, str, type(None), torch.dtype, torch.layout, torch.memory_format)
_MODES = {
    *(torch.no_grad.__enter__.__code__, torch.enable_grad.__enter__.__code__),
    *(torch.set_grad_enabled.__init__.__code__, torch.inference_mode.__enter__.__code__),
    torch.autocast.__enter__.__code__,
}
_CONTAINERS = (dict, list, tuple)


def guard(question: Callable[..., Any], answer: Any, text: str) -> Callable[..., None]:
    """Return the function of a node that asks, and raises unless the answer is the sample's.

    Args:
        text: What is asked, for the error.
    """

    def check(*values: Any) -> None:
        found = question(*values)
        if type(found) is not type(answer) or found != answer:
            raise trace_error(
                f"with this input, {text} is {found!r}, and it was {answer!r} where the subgraphs "
                "were traced: the code around the targets depends on it"
            )

    return check


def is_plain(value: Any) -> bool:
    """Whether a value is a constant of the trace, if the sample's stays the same."""
    return isinstance(value, _PLAIN)


def described(value: Any) -> str:
    """Return what an error calls a constant of traced code."""
    is_short = is_plain(value) or isinstance(value, (int, float))
    return repr(value) if is_short else f"a given {type(value).__name__}"


def kind_of(value: Any) -> str:
    """Return which container a value is."""
    return next((kind.__name__ for kind in _CONTAINERS if isinstance(value, kind)), "no container")


def asked_by_torch() -> bool:
    """Whether the code that asks a proxy is torch's, which does so while it traces."""
    return _is_of_torch(sys._getframe(2))


def is_same(one: Any, other: Any) -> bool:
    """``one is other``, in traced code."""
    asks = getattr(type(one), "asks_whether_it_is", None)
    if asks is not None:
        return bool(asks(one, other))
    asks = getattr(type(other), "asks_whether_it_is", None)
    return one is other if asks is None else bool(asks(other, one))


def length(value: Any) -> Any:
    """``len(value)``, in traced code: a proxy."""
    asks = getattr(type(value), "asks_its_length", None)
    return len(value) if asks is None else asks(value)


class Rewritten(ast.NodeTransformer):
    """Puts calls of functions of this file in place of ``is`` and ``len``.

    Attributes:
        is_changed: Whether there were any.
    """

    def __init__(self, code: types.CodeType) -> None:
        self._own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        self.is_changed = False

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if len(node.ops) != 1 or not isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            return node
        call: ast.expr = self._call(node, IS, [node.left, *node.comparators])
        if isinstance(node.ops[0], ast.IsNot):
            call = ast.copy_location(ast.UnaryOp(ast.Not(), call), node)
        return call

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        is_len = isinstance(node.func, ast.Name) and node.func.id == "len"
        if not is_len or "len" in self._own or len(node.args) != 1 or node.keywords:
            return node
        return self._call(node, LEN, node.args)

    def _call(self, node: ast.expr, name: str, args: list[ast.expr]) -> ast.Call:
        self.is_changed = True
        function = ast.copy_location(ast.Name(name, ast.Load()), node)
        return ast.copy_location(ast.Call(function, args, []), node)


class Unseen:
    """Finds code with an ``is`` that was not rewritten, such as that of a lambda, and the values
    that it may ask about: those that are made while it runs, or that it is called with.

    Args:
        rewritten: The code that was.
        note: Called with a value of an argument.
        refuse_mode: Called with its name where a mode of torch begins, which no proxy sees either.
    """

    def __init__(
        self,
        rewritten: Iterable[types.CodeType],
        note: Callable[[Any], None],
        refuse_mode: Callable[[str], None],
    ) -> None:
        self._rewritten = set().union(*map(_codes_in, rewritten))
        self._note, self._refuse_mode = note, refuse_mode

    def is_running(self) -> bool:
        """Whether such code is running."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not torch.fx.Tracer.trace.__code__:
            if self._asks(frame):
                return True
            frame = frame.f_back
        return False

    @contextlib.contextmanager
    def watching_calls(self) -> Iterator[None]:
        """A context in which the arguments of such code are noted, and modes refused."""
        before = sys.getprofile()
        sys.setprofile(self._note_call)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _note_call(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code in _MODES:
            self._refuse_mode(type(frame.f_locals["self"]).__name__)
        if event == "call" and self._asks(frame):
            for value in frame.f_locals.values():
                for item in _items(value):
                    self._note(item)

    def _asks(self, frame: types.FrameType) -> bool:
        code = frame.f_code
        return _has_is(code) and code not in self._rewritten and not _is_of_torch(frame)


def _items(value: Any) -> Iterable[Any]:
    if type(value) is dict:
        return value.values()
    return value if type(value) in (tuple, list) else (value,)


def _codes_in(code: types.CodeType) -> set[types.CodeType]:
    inner = [_codes_in(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return {code}.union(*inner)


@functools.cache
def _has_is(code: types.CodeType) -> bool:
    operations = {instruction.opname for instruction in dis.get_instructions(code)}
    return "IS_OP" in operations or any(name.endswith("_NONE") for name in operations)


def _is_of_torch(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).split(".")[0] in ("torch", "flex_model")
