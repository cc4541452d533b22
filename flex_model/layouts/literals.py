"""Finds the numbers of a call that are literals in its source, as in ``x.repeat_interleave(2)``.
The unsharded program is the same source, so it passes them, too, whichever size of a rank equals
them.

Only the source's text tells a literal from a number in a variable. It is trusted where it compiles
to the very code that runs; what is made at run time, such as a traced graph, has no file.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from flex_model.layouts.call_sizes import plain_name
from flex_model.layouts.sizes import tagged

_OPERATORS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "remainder",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
}
_SUBSCRIPTS = ("getitem", "setitem")


def with_literals(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of the function that is called, with its literals tagged.

    Args:
        name: The function's; it is called by the code that called the caller of this function.
    """
    passed = Counter(_numbers((args, tuple(kwargs.values()))))
    if not passed:
        return args, kwargs
    frame = _calling(name, sys._getframe(1).f_back)
    if frame is None:
        return args, kwargs
    written = Counter(_literals(frame.f_code, frame.f_lasti, plain_name(name)))
    # Where the call has another argument, too, that is equal, either may be any of them.
    found = {number for number, count in written.items() if passed[number] == count}
    if not found:
        return args, kwargs
    return _tag(args, found), {key: _tag(value, found) for key, value in kwargs.items()}


def _calling(name: str, frame: FrameType | None) -> FrameType | None:
    """Return the frame whose source has the call; None where that is torch's."""
    if frame is not None and frame.f_code.co_name == "handle_torch_function":
        frame = frame.f_back  # the function itself, written in Python
        if frame is None or frame.f_code.co_name != name:
            return None
        frame = frame.f_back
    if frame is None or str(frame.f_globals.get("__name__")).startswith("torch."):
        return None
    return frame


def _numbers(value: Any) -> Iterator[tuple[type, Any]]:
    """Yield the plain numbers in arguments, with their types: 2 and 2.0 are equal."""
    if type(value) in (int, float):
        yield type(value), value
    elif type(value) in (tuple, list):
        for item in value:
            yield from _numbers(item)
    elif type(value) is slice:
        yield from _numbers((value.start, value.stop, value.step))


def _tag(value: Any, found: set[tuple[type, Any]]) -> Any:
    if type(value) in (int, float):
        is_literal = (type(value), value) in found
        return tagged(value, {None: ("source", value)}) if is_literal else value
    if type(value) in (tuple, list):
        return type(value)(_tag(item, found) for item in value)
    if type(value) is slice:
        return slice(*_tag((value.start, value.stop, value.step), found))
    return value


@lru_cache(maxsize=4096)
def _literals(code: CodeType, at: int, name: str) -> tuple[tuple[type, Any], ...]:
    """Return the numbers that are literals among the arguments of the call at this instruction, if
    it calls a function of this name.
    """
    if code not in _codes_of(code.co_filename):
        return ()
    try:
        text = _text_at(code, at)
        node = None if text is None else ast.parse(f"({text})", mode="eval").body
    except (SyntaxError, ValueError):  # a part of a statement
        return ()
    return tuple(_numbers([_value(one) for one in _arguments(node, name)]))


def _arguments(node: Any, name: str) -> Iterable[ast.expr]:
    """Return the arguments that the source shows of a call of ``name``."""
    if isinstance(node, ast.Call):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if plain_name(called) == name:
            return [*node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.Subscript) and name in _SUBSCRIPTS:
        return [node.slice]
    elif isinstance(node, ast.BinOp) and _OPERATORS.get(type(node.op)) == name:
        return [node.left, node.right]
    return []


def _value(node: ast.expr | None) -> Any:
    """Return the numbers that are written in an argument; None for what is computed."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value(node.operand)
        return -number if type(number) in (int, float) else None
    if isinstance(node, (ast.Tuple, ast.List)):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Slice):
        return [_value(item) for item in (node.lower, node.upper, node.step)]
    return None


def _text_at(code: CodeType, at: int) -> str | None:
    """Return the source of the expression that an instruction evaluates; None where the code does
    not tell (Python 3.10).
    """
    if not hasattr(code, "co_positions"):
        return None
    first, last, start, end = next(islice(code.co_positions(), at // 2, None), (None,) * 4)
    if first is None or last is None or start is None or end is None:
        return None
    lines = _lines_of(code.co_filename)[first - 1 : last]
    lines[-1] = lines[-1][:end]  # columns count bytes
    lines[0] = lines[0][start:]
    return b"".join(lines).decode()


@lru_cache(maxsize=256)
def _lines_of(path: str) -> list[bytes]:
    """Return the lines of a file; none if there is no such file."""
    try:
        with open(path, "rb") as file:
            return file.readlines()
    except OSError:
        return []


@lru_cache(maxsize=256)
def _codes_of(path: str) -> frozenset[CodeType]:
    """Return the code of all functions in a file, as it is now."""
    try:
        pending = [compile(b"".join(_lines_of(path)), path, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return frozenset()
    found = set()
    while pending:
        code = pending.pop()
        found.add(code)
        pending += [one for one in code.co_consts if isinstance(one, CodeType)]
    return frozenset(found)
