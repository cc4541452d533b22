"""Editing functions run on tensors without values, to see what a run would meet."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flex_model.distributed.layout import Shape
from flex_model.errors import nearest
from flex_model.hooks.core import HookCore
from flex_model.hooks.registration import Registration
from flex_model.hooks.user_function import kind_of
from flex_model.inspection.edits.findings import (
    ERROR,
    WARNING,
    Finding,
    Place,
    Reports,
    Source,
    Stopped,
)
from flex_model.inspection.edits.lines import Lines
from flex_model.inspection.edits.undo import put_back, same_random_state
from flex_model.inspection.edits.verdicts import (
    UnknownParameterError,
    judge_error,
    judge_graph,
    valid_results,
)
from flex_model.inspection.edits.watch import StandIns, Watch
from flex_model.inspection.shapes_only import as_it_was


@dataclass(frozen=True)
class Given:
    """A tensor that an editing function is given in one call."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def make(self, with_grad: bool) -> Tensor:
        """One without values."""
        with torch.inference_mode(False):  # else nothing tells that it was written to
            return torch.empty(
                self.shape,
                dtype=self.dtype,
                device=self.device,
                requires_grad=self.requires_grad and with_grad,
            )


class Rehearsal:
    """All calls of the editing functions of one run, in its order: they share ``save_ctx`` and what
    they keep. Use it as a context; when it is over, all that they changed is as it was. Local.

    Args:
        split: As of ``Watch``.
        parameters: Shape and dtype of the full parameters that hooks name.
        is_alone: Whether one rank only runs editing functions.

    Attributes:
        findings: By registration index.
        edited: By registration index: of each call and tensor, whether it changed that; None where
            that is not known.
    """

    def __init__(
        self,
        core: HookCore,
        registrations: Sequence[Registration],
        split: Mapping[int, tuple[str, bool]],
        parameters: Mapping[str, tuple[Shape, torch.dtype]],
        is_alone: bool,
    ) -> None:
        self._core, self._registrations = core, registrations
        self._split, self._parameters = split, parameters
        self._random_is = WARNING if is_alone else ERROR
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._stand_ins = StandIns()
        self._made: dict[int, list[weakref.ref[Tensor]]] = {}
        self._unfinished = ""  # the first function whose values would have been needed
        self.findings: dict[int, list[Finding]] = {}
        self.edited: dict[int, list[bool | None]] = {}

    def __enter__(self) -> Rehearsal:
        core = self._core
        functions = [r.given.editing_function for r in self._registrations]
        with contextlib.ExitStack() as stack:
            stack.enter_context(same_random_state())
            stack.enter_context(as_it_was(core.module))
            stack.enter_context(as_it_was(core.modules))
            stack.enter_context(put_back(functions, core.save_ctx))
            stack.enter_context(_torch_is_quiet())
            if "torch._dynamo" in sys.modules:  # else nothing is compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
        self._stand_ins = StandIns()
        self._find_kept()

    def run(self, registration: Registration, givens: Sequence[Given]) -> None:
        """One call of a hook's editing function on its tensors. What it raises is a finding.

        Args:
            registration: That of the last of them.
        """
        function, channel = registration.given, self._core.channel
        source = Source(function.editing_function)

        def report(level: str, problem: str, message: str, place: Place) -> None:
            self._report(registration, source, level, problem, message, place)

        reports = Reports(source, report)
        watch = Watch(self._fake_mode, reports, self._split, self._stand_ins)
        function.parameters = self._full_parameters(function.parameter_names, givens[-1].device)
        outer, channel.edit_of = channel.edit_of, registration.describe()
        edited: list[bool | None] = [None] * len(givens)
        try:
            edited = self._follow(registration, givens, reports, watch)
        except Stopped:
            self._note_unfinished(registration, source)
        except (Exception, SystemExit) as error:
            judge_error(error, list(self._core.modules), self._unfinished, reports)
        finally:
            channel.edit_of = outer
            function.parameters = {}
            self._made.setdefault(registration.index, []).extend(watch.forget())
        self.edited.setdefault(registration.index, []).extend(edited)

    def _note_unfinished(self, registration: Registration, source: Source) -> None:
        """What it would have put into ``save_ctx`` is missing in later functions."""
        found = self.findings[registration.index]
        if not self._unfinished and found[-1].level != ERROR:
            self._unfinished = f"{source.name} of the {registration.describe()}"

    def _follow(
        self,
        registration: Registration,
        givens: Sequence[Given],
        reports: Reports,
        watch: Watch,
    ) -> list[bool | None]:
        """Call it, and judge what it did. Which of its tensors it changed; None where what it
        returned can't go on in the model.
        """
        is_activation = registration.kind in ("forward", "forward_pre")
        with_grad = torch.is_grad_enabled() and is_activation
        with self._fake_mode, torch.set_grad_enabled(with_grad):
            starts = [given.make(with_grad) for given in givens]
            fulls = [start.clone() if start.requires_grad else start for start in starts]
            with watch, Lines(reports, self._random_is) as lines:
                watch.follow(fulls)
                before = [(full._version, kind_of(full)) for full in fulls]
                result = self._call(registration, fulls)
                place = lines.returned or reports.source.place
                kinds = [kind for _, kind in before]
                results = valid_results(registration, result, fulls, kinds, reports, place)
                if results is None:
                    return [None] * len(fulls)
                edited = [
                    result is not full or full._version != version
                    for result, full, (version, _) in zip(results, fulls, before)
                ]
                if not any(edited) and watch.unseen_write is not None:
                    reports.add(
                        ERROR,
                        "unseen write",
                        "written through .data, which is not seen: the model goes on as if nothing "
                        "had been changed; write to the tensor itself, or return a new one",
                        watch.unseen_write,
                    )
                elif any(edited) and with_grad:
                    changed = [result for result, is_new in zip(results, edited) if is_new]
                    others = self._stand_ins.leaves()
                    judge_graph(watch, starts, changed, others, reports, place)
        return list(edited)

    def _call(self, registration: Registration, fulls: Sequence[Tensor]) -> Any:
        module = None if registration.module is None else registration.module()
        function: Any = registration.given.editing_function
        inputs = tuple(fulls) if registration.given.members else fulls[0]
        return function(module, inputs, self._core.save_ctx, self._core.modules)

    def _full_parameters(self, names: Iterable[str], device: torch.device) -> Any:
        with self._fake_mode:
            return _Named(
                (name, torch.empty(shape, dtype=dtype, device=device))
                for name, (shape, dtype) in self._parameters.items()
                if name in names
            )

    def _report(
        self,
        registration: Registration,
        source: Source,
        level: str,
        problem: str,
        message: str,
        place: Place,
    ) -> None:
        found = self.findings.setdefault(registration.index, [])
        if any((f.file, f.line, f.problem) == (place.file, place.line, problem) for f in found):
            return
        found.append(Finding.of(registration, source, level, problem, message, place))

    def _find_kept(self) -> None:
        """Whoever still holds a tensor without values would take it for a real one later."""
        if any(ref() is not None for refs in self._made.values() for ref in refs):
            gc.collect()
        for registration in self._registrations:
            refs = self._made.get(registration.index, ())
            if any(ref() is not None for ref in refs):
                source = Source(registration.given.editing_function)
                message = (
                    "keeps a tensor of the dry run, which has no values, in a place from which it "
                    "can't be taken again; make that empty before you run the model, and keep "
                    "what you need in save_ctx"
                )
                self._report(registration, source, ERROR, "kept tensor", message, source.place)
        self._made.clear()


class _Named(dict[str, Tensor]):
    """The full parameters of a HookFunction."""

    def __missing__(self, name: object) -> Any:
        raise UnknownParameterError(
            f"hook_function.parameters has no {name!r}; name it in HookFunction(parameters=...) "
            f"({nearest(str(name), self, 'parameter')})"
        )


@contextlib.contextmanager
def _torch_is_quiet() -> Iterator[None]:
    """It logs errors of shapes with a traceback of its own, and they are raised besides; and warns
    of its own copies of tensors without values.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        logger.disabled = before
