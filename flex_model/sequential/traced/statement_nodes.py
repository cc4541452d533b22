"""Makes single nodes of the statements that ask in Python for the values of tensors.

Only the functions on the way to a target are traced (`code_path`), and one of their statements may
need what a graph does not have: the truth or the number in a tensor, how many there are. Such a
statement, if no target is called in it, runs as it is each time the graph runs, on the real values
of the variables it reads; those it assigns are its results. A list that it appends to is made in
it: the statements from there on are one. While a model is traced, its functions have code in which
these statements are calls.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import copy
import inspect
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flex_model.errors import TraceError
from flex_model.sequential.traced.code_path import CodePath

_CALL, _RESULT, _VALUE = "_flex_model_statement", "_flex_model_result", "_flex_model_value"
_FUTURE = __future__.annotations.compiler_flag
_LOOPS = (ast.For, ast.While)
# What means something else outside of its function, or has effects that are no results.
_REFUSED = (
    *(ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Delete),
    *(ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef),
)
_REFUSED_NAMES = {"super", "__class__", "locals", "vars", "dir", "eval", "exec"}
_VARIES = object()  # in place of a value that a graph computes


class Retrace(BaseException):
    """A statement has become a node: the trace begins again."""


@dataclass(frozen=True, eq=False)
class Statement:
    """One statement, or several in a row, as code of its own.

    Attributes:
        nodes: They. Of ``return x`` and ``y.z = x`` only the value is meant.
        function: The function that they are in.
        reads, assigns: Names of variables.
    """

    nodes: list[ast.stmt]
    function: types.FunctionType
    code: types.CodeType
    reads: frozenset[str]
    assigns: frozenset[str]

    @property
    def place(self) -> str:
        return f"{self.code.co_filename}:{self.nodes[0].lineno}"

    def bind(self) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """Return one call of it, a function from the values of variables to those it assigns. A
        variable that holds no tensor or number must be assigned the same whenever it is called:
        the code that was traced went on with it.
        """
        known: dict[str, Any] | None = None

        def statement(variables: dict[str, Any]) -> dict[str, Any]:
            nonlocal known
            space = self.function.__globals__ | variables
            for name in self.assigns.difference(variables):
                space.pop(name, None)
            exec(self.code, space)
            result = {name: space[name] for name in sorted(self.assigns) if name in space}
            fixed = {name: _fixed(value) for name, value in result.items()}
            if known is None:
                known = fixed
            elif not _is_same(known, fixed):
                raise TraceError(
                    f"{self.place}: with this input the statement assigns other variables than "
                    "where the subgraphs were traced, or others that are no tensors. Use "
                    "flex_model.sequential.run, which traces nothing and is exact for any model"
                )
            return result

        return statement


class Statements:
    """The statements of traced functions that run as single nodes."""

    def __init__(self, path: CodePath) -> None:
        self._path = path
        self._definitions: dict[types.FunctionType, ast.FunctionDef | None] = {}
        self._chosen: dict[types.FunctionType, list[Statement]] = {}

    def choose_running(self) -> bool:
        """Make a node of the statement that is running, in the innermost function on the path to a
        target. Returns False if none there can be one.
        """
        functions = {function.__code__: function for function in self._path.functions}
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code not in functions:
            frame = frame.f_back
        if frame is None:
            return False
        function = functions[frame.f_code]
        chosen = self._chosen.setdefault(function, [])
        found = self._smallest(function, frame.f_lineno, chosen)
        if found is None or any(one.nodes == found.nodes for one in chosen):
            return False
        inside = {part for node in found.nodes for part in ast.walk(node)}
        chosen[:] = [*(one for one in chosen if inside.isdisjoint(one.nodes)), found]
        return True

    def _smallest(
        self, function: types.FunctionType, line: int, chosen: list[Statement]
    ) -> Statement | None:
        """Return the smallest statement at a line that can be a node."""
        definition = self._definition_of(function)
        if definition is None:
            return None
        made, is_in_loop = None, False
        for body, index in _statements_at(definition, line):  # the last that can be is the smallest
            nodes = _with_neighbours(body, index, [one.nodes for one in chosen])
            lines = range(nodes[0].lineno, (nodes[-1].end_lineno or line) + 1)
            if self._path.functions[function].isdisjoint(lines):
                made = _statement(nodes, function, definition, is_in_loop) or made
            is_in_loop = is_in_loop or isinstance(body[index], _LOOPS)
        return made

    @contextlib.contextmanager
    def as_nodes(self, as_node: Callable[[Any], Any]) -> Iterator[None]:
        """A context in which the chosen statements are calls of ``as_node(...)``."""
        every: list[Statement] = []

        def call(index: int, variables: dict[str, Any]) -> dict[str, Any]:
            statement = every[index]
            named = {n: v for n, v in variables.items() if n in statement.reads}
            return _as_variables(as_node(statement.bind())(named))

        with contextlib.ExitStack() as undo:
            for function, chosen in self._chosen.items():
                definition = self._definition_of(function)
                if definition is None or not chosen:
                    continue
                undo.callback(setattr, function, "__code__", function.__code__)
                undo.callback(function.__globals__.pop, _CALL, None)
                code = _with_calls(function.__code__, definition, chosen, len(every))
                function.__code__, function.__globals__[_CALL] = code, call
                every += chosen
            yield

    def _definition_of(self, function: types.FunctionType) -> ast.FunctionDef | None:
        if function not in self._definitions:
            self._definitions[function] = _definition(function)
        return self._definitions[function]


def _as_variables(result: Any) -> dict[str, Any]:
    """Return the variables of a statement that is a node: proxies of tensors and numbers, and all
    else as it is for the sample.
    """
    sample = getattr(result, "sample", result)
    return {
        name: operator.getitem(result, name) if _fixed(value) is _VARIES else value
        for name, value in sample.items()
    }


def _fixed(value: Any) -> Any:
    """Return a value that the traced code may be traced with; ``_VARIES`` for one in a graph."""
    return _VARIES if _holds_numbers(value) else value


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_numbers, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(_holds_numbers, value))
    return isinstance(value, (Tensor, int, float, complex))


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        a is b or (type(a) is type(b) and a is not _VARIES and bool(a == b))
        for a, b in zip(one.values(), other.values())
    )


# ---- Source --------------------------------------------------------------------------------------


def _definition(function: types.FunctionType) -> ast.FunctionDef | None:
    """Return a function's definition without decorators; None if its source is not at hand."""
    try:
        lines, first = inspect.getsourcelines(function.__code__)
        is_indented = lines[0][:1].isspace()
        tree: Any = ast.parse("".join(["if 1:\n" if is_indented else "", *lines]))
    except (OSError, SyntaxError):
        return None
    definition = tree.body[0].body[0] if is_indented else tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    ast.increment_lineno(tree, first - (2 if is_indented else 1))
    definition = _changed(definition, decorator_list=[])
    code = _compiled(function.__code__, definition)
    if code is None or _content(code) != _content(function.__code__):
        return None  # the file has changed, or a name is private to a class
    return definition


def _content(code: types.CodeType) -> tuple[Any, ...]:
    """Return what differs if code is of another source. Not its bytes: Python compiles calls of
    what a module imports in its own way.
    """
    constants = [one for one in code.co_consts if not isinstance(one, types.CodeType)]
    return constants, code.co_names, code.co_varnames, code.co_cellvars


def _statements_at(definition: ast.FunctionDef, line: int) -> list[tuple[list[ast.stmt], int]]:
    """Return the statements that contain a line, the outermost first: each as a place in a body."""
    found: list[tuple[list[ast.stmt], int]] = []
    inner: ast.AST | None = definition
    while inner is not None:
        places = [(body, i) for body in _bodies(inner) for i in range(len(body))]
        around = [(b, i) for b, i in places if b[i].lineno <= line <= (b[i].end_lineno or line)]
        found += around[:1]
        inner = around[0][0][around[0][1]] if around else None
    return found


def _bodies(node: ast.AST) -> list[list[ast.stmt]]:
    """Return the lists of statements in a statement, also those of its handlers and cases."""
    own = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    parts = [*getattr(node, "handlers", []), *getattr(node, "cases", [])]
    return [*own, *(part.body for part in parts)]


def _with_neighbours(
    body: list[ast.stmt], index: int, chosen: list[list[ast.stmt]]
) -> list[ast.stmt]:
    """Return a statement of a body, and those before it from where it has its lists and dicts;
    with all of what is chosen already, if they overlap.
    """
    first, last = index, index + 1
    changed = {
        name for part in ast.walk(_as_assignment(body[index])) for name in _changed_in_place(part)
    }
    for name in changed:
        made = [i for i in range(index) if _makes_container(body[i], name)]
        first = min(first, *made[-1:], first)
    for others in chosen:
        if body[first:last] != others and not set(others).isdisjoint(body[first:last]):
            places = [i for i, one in enumerate(body) if one in others]
            first, last = min(first, *places), max(last, places[-1] + 1)
    return body[first:last]


def _changed_in_place(node: ast.AST) -> set[str]:
    """Return the variable that a method call or an assignment to an item may change."""
    holder: ast.AST | None = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        holder = node.func.value
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        holder = node.value
    return {holder.id} if isinstance(holder, ast.Name) else set()


def _makes_container(node: ast.stmt, name: str) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, (ast.List, ast.Dict))
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    )


def _statement(
    nodes: list[ast.stmt],
    function: types.FunctionType,
    definition: ast.FunctionDef,
    is_in_loop: bool,
) -> Statement | None:
    """Return statements as code of their own; None if they can't be."""
    bodies = [_as_assignment(node) for node in nodes] if len(nodes) == 1 else nodes
    inside = [part for body in bodies for part in ast.walk(body)]
    names = {part.id for part in inside if isinstance(part, ast.Name)}
    if (
        any(isinstance(part, _REFUSED) for part in inside)
        or names & _REFUSED_NAMES
        or any(map(_leaves_a_loop, bodies))
    ):
        return None
    here = set(inside)
    used = {n.id for n in ast.walk(definition) if isinstance(n, ast.Name) and n not in here}
    used |= {_VALUE} | (names if is_in_loop else set())
    module = ast.Module(bodies, type_ignores=[])
    code = compile(
        ast.fix_missing_locations(module),
        function.__code__.co_filename,
        "exec",
        flags=function.__code__.co_flags & _FUTURE,
        dont_inherit=True,
    )
    assigned = set().union(*map(_assigned, bodies)) & used
    return Statement(nodes, function, code, frozenset(names), frozenset(assigned))


def _as_assignment(node: ast.stmt) -> ast.stmt:
    """Return what runs as a node: of ``return x`` and ``y.z = x`` the value only."""
    if not _is_value_only(node):
        return node
    target = ast.Name(_VALUE, ast.Store())
    return ast.copy_location(ast.Assign([target], node.value), node)  # type: ignore[attr-defined]


def _is_value_only(node: ast.stmt) -> bool:
    if isinstance(node, ast.Return):
        return node.value is not None
    return isinstance(node, ast.Assign) and any(
        isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets
    )


def _leaves_a_loop(node: ast.AST) -> bool:
    """Whether a ``break`` or ``continue`` in it is of a loop around it."""
    if isinstance(node, (ast.Break, ast.Continue)):
        return True
    inner: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, _LOOPS):
        inner = node.orelse
    return any(map(_leaves_a_loop, inner))


def _assigned(node: ast.AST, is_in_comprehension: bool = False) -> set[str]:
    """Return the variables of the function that a statement assigns."""
    if isinstance(node, ast.Lambda):
        return set()
    if isinstance(node, ast.NamedExpr):
        return {node.target.id} | _assigned(node.value, is_in_comprehension)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and not is_in_comprehension:
        return {node.id}
    is_in_comprehension = is_in_comprehension or isinstance(node, ast.comprehension)
    return set().union(*(_assigned(n, is_in_comprehension) for n in ast.iter_child_nodes(node)))


def _with_calls(
    original: types.CodeType, definition: ast.FunctionDef, chosen: list[Statement], first: int
) -> types.CodeType:
    """Return the code of a function with calls in place of statements, numbered from ``first``."""
    calls: dict[ast.stmt, list[ast.stmt]] = {}
    for index, one in enumerate(chosen):
        calls |= {one.nodes[0]: _call(one, first + index), **{node: [] for node in one.nodes[1:]}}
    # The copies of the nodes that are replaced are those nodes themselves.
    copied = copy.deepcopy(definition, {id(node): node for node in calls})
    code = _compiled(original, ast.fix_missing_locations(_Replace(calls).visit(copied)))
    assert code is not None
    return code


def _call(statement: Statement, index: int) -> list[ast.stmt]:
    original = statement.nodes[0]
    if _VALUE in statement.assigns:
        value: Any = ast.parse(f"{_CALL}({index}, locals())[{_VALUE!r}]", mode="eval")
        return [_changed(original, value=value.body)]
    source = f"{_RESULT} = {_CALL}({index}, locals())\n" + "\n".join(
        f"if {name!r} in {_RESULT}: {name} = {_RESULT}[{name!r}]"
        for name in sorted(statement.assigns)
    )
    parts = ast.parse(source).body
    for node in itertools.chain.from_iterable(map(ast.walk, parts)):
        if isinstance(node, (ast.stmt, ast.expr)):
            ast.copy_location(node, original)
    return parts


class _Replace(ast.NodeTransformer):
    def __init__(self, calls: dict[ast.stmt, list[ast.stmt]]) -> None:
        self._calls = calls

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt) and node in self._calls:
            return self._calls[node]
        return self.generic_visit(node)


def _compiled(original: types.CodeType, definition: ast.FunctionDef) -> types.CodeType | None:
    """Return the code of a definition, with the free variables of the original."""
    free = ", ".join(original.co_freevars)
    outer: Any = ast.parse(f"def outer({free}): ...").body[0]
    code = _code_in(original, _changed(outer, body=[definition]))
    if code.co_freevars != original.co_freevars:
        # Names that only a replaced statement used stay free variables.
        body = [*definition.body, *ast.parse(f"if 0: {free}").body]
        code = _code_in(original, _changed(outer, body=[_changed(definition, body=body)]))
    return code if code.co_freevars == original.co_freevars else None


def _changed(node: Any, **fields: Any) -> Any:
    """Return a copy of a node with other fields."""
    return ast.copy_location(type(node)(**(dict(ast.iter_fields(node)) | fields)), node)


def _code_in(original: types.CodeType, outer: ast.FunctionDef) -> types.CodeType:
    module = ast.fix_missing_locations(ast.Module([outer], type_ignores=[]))
    flags = original.co_flags & _FUTURE
    compiled = compile(module, original.co_filename, "exec", flags=flags, dont_inherit=True)
    inner = next(one for one in compiled.co_consts if isinstance(one, types.CodeType))
    return next(
        one
        for one in inner.co_consts
        if isinstance(one, types.CodeType) and one.co_name == original.co_name
    )
