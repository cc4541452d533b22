"""Calls each editing function once on tensors without values, before a run, and finds what is wrong
with it; the findings are the same on every rank. Torch's modes around the call refuse what a run
would refuse, or what needs values.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from flex_model.distributed.placement import Shape, Shard
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.errors import HookError, text_of
from flex_model.hooks.core import HookCore
from flex_model.hooks.function import name_of
from flex_model.hooks.registration import Registration, describe_hook
from flex_model.hooks.user_function import check_result, kind_of, on_copy, results_of
from flex_model.inspection.shapes_only import without_values
from flex_model.integrations import dtensor
from flex_model.integrations.compiled import DispatchMode
from flex_model.integrations.torch_private import (
    FakeTensor,
    FakeTensorMode,
    fake_tensor,
    is_functorch_tensor,
)
from flex_model.names import clean

#: The levels of a finding: a run would raise an error or compute something else than was meant; it
#: may have been meant; a dry run can't decide it, as it has shapes only.
ERROR, WARNING, NOT_CHECKED = "error", "warning", "not checked"


@dataclass(frozen=True)
class Finding:
    """One problem that a dry run found in an editing function, or a part that it did not check.

    Attributes:
        level: ``"error"``, ``"warning"`` or ``"not checked"``.
        problem: The kind of problem, in a word or two; docs/checks.md lists them.
        message: What was expected, what was found, and what to do.
        hook: Its name, kind and index, as messages name it.
        function: The editing function's name.
        file, line: Where it is written; of what it raised, the innermost line in that file.
    """

    level: str
    problem: str
    message: str
    hook: str
    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.line}: {self.level}: {self.message} "
            f"[{self.problem}; {self.function} in the {self.hook}]"
        )


def _finding(
    registration: Registration,
    level: str,
    problem: str,
    message: str,
    error: BaseException | None = None,
) -> Finding:
    """Return a finding about a hook's function, at the line that raised ``error``, if any did."""
    function = registration.given.editing_function
    code = _code_of(function)
    file, line = (code.co_filename, code.co_firstlineno) if code else ("", 0)
    for frame, number in traceback.walk_tb(None if error is None else error.__traceback__):
        if frame.f_code.co_filename == file:
            line = number
    hook = describe_hook(registration.name, registration.kind, registration.given.unpack_idx)
    return Finding(level, problem, message, hook, name_of(function), file, line)


def _code_of(function: Any) -> CodeType | None:
    """The code of a function, a method, a partial or a callable object."""
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        return _code_of(function.func)
    if isinstance(function, nn.Module):
        function = function.forward
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


_READS_MEMORY = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr}
_READS_VALUES = {torch.equal, torch.allclose, Tensor.equal, Tensor.allclose, Tensor.item}
_READS_VALUES |= {Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__}
_READS_VALUES |= {Tensor.__index__, Tensor.__complex__, *_READS_MEMORY}

#: By the id of a tensor, which is kept alive, as another could have its id then.
Sharded = Mapping[int, tuple[Tensor, str, bool]]


class RefusedError(Exception):
    """Ends the editing function.

    Attributes:
        level, problem: Those of the finding, which has the message of the error.
    """

    def __init__(self, level: str, problem: str, message: str) -> None:
        super().__init__(message)
        self.level, self.problem = level, problem


def needs_values(what: str) -> RefusedError:
    message = f"{what} needs values, and a dry run has shapes only: not checked from here on"
    return RefusedError(NOT_CHECKED, "depends on values", message)


class FakeArguments(TorchFunctionMode):
    """Puts fake tensors in the place of real ones before autograd sees those: whatever is written
    to them, and whatever gradients arrive, the real ones stay as they were.

    Args:
        fakes: Those in the place of real ones so far, by the ids of these, which are kept alive.
        watch: Reports what can't be read; what it knows as shards is not replaced.
    """

    def __init__(
        self, fake_mode: FakeTensorMode, fakes: dict[int, tuple[Tensor, Tensor]], watch: Watch
    ) -> None:
        super().__init__()
        self._fake_mode, self._fakes, self._watch = fake_mode, fakes, watch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.__format__ and isinstance(args[0], FakeTensor):
            return repr(args[0])  # for print, as of a tensor with values
        if func in _READS_VALUES:
            if not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
                with fake_tensor.unset_fake_temporarily():
                    return func(*args, **kwargs)
            with contextlib.suppress(fake_tensor.DataDependentOutputException):
                if func not in _READS_MEMORY:
                    return func(*args, **kwargs)  # of one number, whose value torch keeps
            self._watch.refuse(needs_values(f"{func.__name__.strip('_')}()"))
        args, kwargs = tree_map_only(Tensor, self._faked, (args, kwargs))
        return func(*args, **kwargs)

    def _faked(self, tensor: Tensor) -> Tensor:
        is_plain = type(tensor) in (Tensor, nn.Parameter) and not is_functorch_tensor(tensor)
        if not is_plain or id(tensor) in self._watch.sharded:
            return tensor
        if id(tensor) not in self._fakes:
            self._fakes[id(tensor)] = (tensor, self._fake_mode.from_tensor(tensor))
        return self._fakes[id(tensor)][1]


class Watch(DispatchMode):
    """Refuses collectives and shards of weights in one call.

    Attributes:
        sharded: Parameters of which this rank has a shard: itself, its name, and whether FSDP
            alone shards them.
        refused: What was refused, even where the function caught the exception.
    """

    def __init__(self, sharded: Sharded) -> None:
        super().__init__()
        self.refused: list[RefusedError] = []
        self.sharded = sharded

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if id(leaf) in self.sharded:
                self._refuse_shard(*self.sharded[id(leaf)][1:])
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            message = (
                f"{func.overloadpacket} is a collective: an editing function may run on one rank "
                "only, so the ranks would deadlock; its tensor is the full one already, and "
                "weights are named in HookFunction(parameters=...)"
            )
            self.refuse(RefusedError(ERROR, "collective", message))
        if any(issubclass(kind, dtensor.dtensor_class()) for kind in types):
            return NotImplemented  # its own operations are dispatched again, on plain tensors
        return func(*args, **kwargs)

    def _refuse_shard(self, name: str, is_fsdp: bool) -> NoReturn:
        what = "is a shard of FSDP's whenever its module does not run" if is_fsdp else "is a shard"
        message = (
            f"parameter {name!r} {what}, not the full weight; name it in "
            f"HookFunction(parameters=[{name!r}]), and take it from hook_function.parameters"
            + ("; not checked from here on" if is_fsdp else "")
        )
        self.refuse(RefusedError(WARNING if is_fsdp else ERROR, "sharded weight", message))

    def refuse(self, error: RefusedError) -> NoReturn:
        self.refused.append(error)
        raise error


_VALUE_ERRORS = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedFakeTensorException,
)


@dataclass(frozen=True)
class FakeInput:
    """The kind of a tensor that is passed to an editing function."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def make(self) -> Tensor:
        """A tensor of this kind."""
        with torch.inference_mode(False):
            tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            return tensor.requires_grad_(self.requires_grad and torch.is_grad_enabled())


class FakeCalls:
    """Calls editing functions in the order of a run. Local.

    Args:
        sharded: As of ``Watch``.
        parameters: Shape and dtype of the full parameters that hooks name.
    """

    def __init__(
        self,
        core: HookCore,
        fake_mode: FakeTensorMode,
        sharded: Sharded,
        parameters: Mapping[str, tuple[Shape, torch.dtype]],
    ) -> None:
        self._core, self._sharded, self._parameters = core, sharded, parameters
        self._fake_mode = fake_mode
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}  # see ``FakeArguments``
        self._unfinished = ""  # the first function that was not checked to its end

    def findings(self, registration: Registration, inputs: Sequence[FakeInput]) -> list[Finding]:
        """Call a hook's editing function.

        Args:
            registration: That of the last of its tensors.
        """
        function, communicator = registration.given, self._core.communicator
        watch = Watch(self._sharded)
        is_activation = registration.kind in ("forward", "forward_pre")
        outer = communicator.edit_of
        found: list[Finding] = []
        try:
            communicator.set_edit(registration.describe())
            with self._fake_mode, torch.set_grad_enabled(is_activation and torch.is_grad_enabled()):
                parameters = {
                    name: torch.empty(shape, dtype=dtype, device=inputs[-1].device)
                    for name, (shape, dtype) in self._parameters.items()
                    if name in function.parameter_names
                }
                function.pass_parameters(parameters)
                found = self._call(registration, inputs, watch)
        except RefusedError:
            pass
        except (Exception, SystemExit) as error:
            found = [self._raised(error, registration)]
        finally:
            communicator.set_edit(outer)
            function.pass_parameters({})
        refused = [_finding(registration, e.level, e.problem, str(e), e) for e in watch.refused]
        found = list(dict.fromkeys([*refused, *found]))
        if not self._unfinished and any(finding.level != ERROR for finding in found):
            self._unfinished = f"{found[0].function} of the {registration.describe()}"
        return found

    def _call(
        self, registration: Registration, inputs: Sequence[FakeInput], watch: Watch
    ) -> list[Finding]:
        starts = [one.make() for one in inputs]
        fulls = [start.clone() if start.requires_grad else start for start in starts]
        kinds = [kind_of(full) for full in fulls]
        module = registration.living_module
        function: Any = registration.given.editing_function
        tensors = tuple(fulls) if registration.given.members else fulls[0]
        with FakeArguments(self._fake_mode, self._fakes, watch), watch:
            result = function(module, tensors, self._core.save_ctx, self._core.modules)
        results: list[Any] = []
        try:
            for one, full, kind in zip(results_of(registration, result), fulls, kinds):
                results.append(full if one is None else one)
                check_result(registration, results[-1], kind)
        except (TypeError, ValueError) as error:
            return [_finding(registration, ERROR, "result", str(error).partition(": ")[2])]
        return self._in_backward(starts, results, registration)

    def _in_backward(
        self, starts: Sequence[Tensor], results: Sequence[Tensor], registration: Registration
    ) -> list[Finding]:
        """Run the backward of an edit: it fails where what it needs was overwritten."""
        outputs = [result for result in results if result.requires_grad]
        fakes = [fake for _, fake in self._fakes.values() if fake.is_leaf]
        leaves = [tensor for tensor in (*starts, *fakes) if tensor.requires_grad]
        if not outputs or not leaves:
            return []
        ones = [torch.empty_like(output) for output in outputs]
        try:
            torch.autograd.grad(outputs, leaves, ones, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            text = str(error).partition(": [")[0][:400]
            message = f"its backward raises: {text}; write to a clone(), not in place"
            return [_finding(registration, ERROR, "raises", message)]
        return []

    def _raised(self, error: BaseException, registration: Registration) -> Finding:
        if isinstance(error, _VALUE_ERRORS):
            refused = needs_values(str(error)[:200])
            return _finding(registration, refused.level, refused.problem, str(refused), error)
        text = f"raises {text_of(error)}".replace("FakeTensor", "Tensor")[:600]
        if not self._unfinished or isinstance(error, HookError):
            return _finding(registration, ERROR, "raises", text, error)
        text += f"; this may come of {self._unfinished}, which was not checked to its end"
        return _finding(registration, NOT_CHECKED, "raises", text, error)


@contextlib.contextmanager
def _torch_is_quiet() -> Iterator[None]:
    """Torch logs errors of shapes with a traceback of its own, besides raising them, and warns of
    its own copies of fake tensors.
    """
    logger = logging.getLogger(fake_tensor.__name__)
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        logger.disabled = before


def check_edits(
    core: HookCore, calls: Mapping[Registration, Sequence[FakeInput] | str]
) -> dict[int, list[Finding]]:
    """Call each hook's editing function once, and return the findings by the hook's registration
    index. Collective over the grid.

    Args:
        calls: In the order of the forward: the tensors that are passed to a hook's function, or why
            they are not known.

    Raises:
        ValueError: the layout of a parameter that a hook names is not known.
    """
    registrations = [r for r in core.table.registrations if r.edits and r.calls_function]
    named = dict.fromkeys(n for r in registrations for n in r.given.parameter_names)
    parameters = {name: core.parameters.full_kind(name) for name in named}
    found: dict[int, list[Finding]] = {}
    if core.executor.edits_on_all or core.mesh.group_rank == 0:
        shapes = without_values(core.module, core.modules)
        with shapes as fake_mode, on_copy(core.save_ctx), _torch_is_quiet():
            fake_calls = FakeCalls(core, fake_mode, _sharded_parameters(core), parameters)
            for registration in _in_order_of_run(registrations, list(calls)):
                inputs = calls.get(registration, "this forward, or its backward, does not call it")
                if isinstance(inputs, str):
                    why = f"not checked: {inputs}"
                    of_hook = [_finding(registration, NOT_CHECKED, "not called", why)]
                else:
                    of_hook = fake_calls.findings(registration, inputs)
                found[registration.index] = of_hook
    return _merged(core, registrations, found)


def _merged(
    core: HookCore, registrations: Sequence[Registration], found: Mapping[int, Sequence[Finding]]
) -> dict[int, list[Finding]]:
    """The findings of all ranks, the same ones once. Collective."""
    local = [[asdict(finding) for finding in found.get(r.index, ())] for r in registrations]
    per_rank = exchange_json(core.communicator, local, "the findings of a dry run")
    merged: dict[int, list[Finding]] = {}
    for registration, *of_ranks in zip(registrations, *per_rank):
        every = (Finding(**finding) for of_rank in of_ranks for finding in of_rank)
        merged[registration.index] = list(dict.fromkeys(every))
    return merged


def _in_order_of_run(
    registrations: Sequence[Registration], called: Sequence[Registration]
) -> list[Registration]:
    """The hooks of the forward; then of the backward, from the end; then all others."""
    forward = [r for r in called if r.kind in ("forward", "forward_pre")]
    backward = [r for r in called if r.is_backward]
    return list(dict.fromkeys([*forward, *backward[::-1], *registrations]))


def _sharded_parameters(core: HookCore) -> Sharded:
    """Return the sharded parameters, for ``Watch``."""
    if core.communicator.is_local:
        return {}
    found: dict[int, tuple[Tensor, str, bool]] = {}
    for full_name, parameter in core.module.named_parameters():
        name = clean(core.module, full_name)
        if not dtensor.is_dtensor(parameter) and core.mesh.tp_size == 1:
            continue
        dp, tp = core.parameters.sources_of(name)[0].placements
        by_tp = tp is None or isinstance(tp, Shard)
        if by_tp or (dtensor.is_dtensor(parameter) and isinstance(dp, Shard)):
            with torch.no_grad():
                tensors = (parameter, dtensor.to_local(parameter))
            found |= {id(one): (one, name, not by_tp) for one in tensors}
    return found
