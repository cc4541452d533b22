"""Compare a sharded model with the unsharded one, site by site."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from flex_model.distributed.gather import Move
from flex_model.distributed.header import Header
from flex_model.distributed.layout import Shape, ShardLayout
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.tracking import LayoutTracker, tensors_of
from flex_model.errors import is_agreed
from flex_model.hooks.core import HookCore
from flex_model.hooks.function import HookFunction
from flex_model.hooks.registration import Registration
from flex_model.hooks.table import EVERYTHING
from flex_model.inspection import text
from flex_model.integrations import fsdp
from flex_model.names import clean, find_module

if TYPE_CHECKING:
    from flex_model.hooks.context import RunContext

Loss = Callable[[Any], Tensor]
Reference = nn.Module | Callable[[], nn.Module] | None

_NOTHING = ((), False)

# What became of a site.
EQUAL, DIFFERS, SHAPES, CALLS, NOT_IN_REFERENCE, NOT_REACHED, NOT_SETTLED = range(7)
_WORDS = (
    "equal",
    "differs",
    "has another shape than in the reference",
    "is called another number of times than in the reference",
    "is not in the reference",
    "has no tensor in this run",
    "its layout was not settled: hook it to see the error",
)


@dataclass(frozen=True)
class SiteDifference:
    """One site of the sharded model beside the reference's.

    Attributes:
        name, kind, unpack_idx: As in ``SiteLayout``.
        result: One of ``EQUAL``, ``DIFFERS`` and their kind in ``flex_model.inspection.verify``.
        max_abs: Largest absolute difference over all calls.
        max_relative: The same, divided by the reference's largest absolute value.
        call: In which call it was largest, counted from 0.
    """

    name: str
    kind: str
    unpack_idx: int
    result: int
    max_abs: float = 0.0
    max_relative: float = 0.0
    call: int = 0

    @property
    def differs(self) -> bool:
        """Whether both models have the site, with other values, shapes or numbers of calls."""
        return self.result in (DIFFERS, SHAPES, CALLS)

    def __str__(self) -> str:
        site = f"{self.kind} of {text.site(self.name, self.unpack_idx)}"
        if self.result not in (EQUAL, DIFFERS):
            return f"{site} {_WORDS[self.result]}"
        return (
            f"{site} {_WORDS[self.result]}: largest difference {self.max_abs:.3g}, relative to the "
            f"largest value {self.max_relative:.3g}, in call {self.call}"
        )


@dataclass(frozen=True)
class VerifyReport:
    """The sites in the order in which the reference finishes them. The same on every rank."""

    rows: tuple[SiteDifference, ...]

    @property
    def is_equal(self) -> bool:
        """Whether no site differs."""
        return self.first_difference is None

    @property
    def first_difference(self) -> SiteDifference | None:
        """The first site, in the order of execution, that differs."""
        return next((row for row in self.rows if row.differs), None)

    def __str__(self) -> str:
        first = self.first_difference
        count = sum(row.result == EQUAL for row in self.rows)
        summary = f"{count} of {len(self.rows)} sites are equal"
        if first is not None:
            summary += f"; the first that differs: {first}"
        cells = [
            [
                text.site(row.name, row.unpack_idx),
                row.kind,
                f"{row.max_abs:.3g}" if row.result in (EQUAL, DIFFERS) else "",
                f"{row.max_relative:.3g}" if row.result in (EQUAL, DIFFERS) else "",
                _WORDS[row.result],
            ]
            for row in self.rows
        ]
        return text.table(["site", "kind", "max abs", "max relative", ""], cells) + "\n" + summary


@dataclass(frozen=True)
class _Site:
    name: str
    kind: str
    unpack_idx: int
    expected_shape: Any = None


class _Looking(HookCore):
    """A core whose hooks only look, and that goes on where a layout can't be settled.

    Attributes:
        unsettled: Registrations whose layout an error told of; the same on every rank.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, timeout_s: float) -> None:
        self.unsettled: set[int] = set()
        self.found: dict[str, list[Tensor]] = {}
        modules = nn.ModuleDict()
        super().__init__(module, mesh, self.found, Namespace(), modules, "all", "rank0", timeout_s)

    def _deliver(self, run: RunContext, kind: str) -> None:
        if not self.channel.is_local:
            self.records.join(run, kind, self._move)

    def hook_failed(self, registration: Registration, error: Exception) -> None:
        """A site without a tensor, or with one that can't be gathered, is left out."""
        if is_agreed(error):
            raise error
        self.unsettled.add(registration.index)

    def _move(self, call, shapes, dtype, known, shard) -> Move:
        try:
            return self.caller.move(call, shapes, dtype, known, shard)
        except ValueError:
            self.unsettled.add(call.registration.index)
            own = [tuple(shard.shape)] * len(shapes)
            return Move.of(self.channel, ShardLayout(), own, dtype)  # nothing is moved


def verify(
    core: HookCore,
    reference: Reference,
    args: Any,
    kwargs: Any,
    loss: Loss | None,
    rtol: float | None,
    atol: float,
    timeout_s: float,
) -> VerifyReport:
    """See ``FlexModel.verify``. Collective over the grid."""
    if core.run is not None or core.in_backward():
        raise RuntimeError("verify: a run of this FlexModel goes on; call it before or after")
    channel, mesh = core.channel, core.mesh
    sites = _sites(core, loss is not None)
    given = _full_inputs(core, args, kwargs)

    expected: dict[str, list[Tensor]] = {}
    flags = torch.zeros(len(sites), 2, dtype=torch.int64)  # in the reference, its place there
    before, channel.timeout_s = channel.timeout_s, timeout_s
    try:
        if mesh.place == 0:
            try:
                expected = _run_reference(reference, sites, given, loss, flags)
            except Exception as error:
                channel.set_error(f"verify: the reference failed: {error}", error)
                if channel.is_local:
                    raise
        if not channel.is_local:
            channel.agree(Header("inputs"), "verify, after the reference has run on rank 0")
        flags = channel.exchange(flags)[0]
    finally:
        channel.timeout_s = before

    wanted = [i for i in range(len(sites)) if flags[i, 0] == EQUAL]
    found, unsettled = _run_sharded(core, sites, wanted, (args, kwargs), loss)
    table = torch.zeros(len(sites), 4, dtype=torch.float64)
    if mesh.place == 0:
        for i, row in enumerate(table):
            result = NOT_SETTLED if i in unsettled else int(flags[i, 0])
            row[0] = result
            if result == EQUAL:
                row[:] = _compare(found.get(str(i), []), expected[str(i)], rtol, atol)
    table = channel.exchange(table)[0]
    order = sorted(range(len(sites)), key=lambda i: (flags[i, 0] != EQUAL, int(flags[i, 1]), i))
    rows = [_difference(sites[i], table[i].tolist()) for i in order]
    if not core.table.registrations:  # containers are not called
        rows = [row for row in rows if row.result != NOT_REACHED]
    return VerifyReport(tuple(rows))


def _difference(site: _Site, row: Sequence[float]) -> SiteDifference:
    result, max_abs, relative, call = row
    return SiteDifference(
        site.name, site.kind, site.unpack_idx, int(result), max_abs, relative, int(call)
    )


def _sites(core: HookCore, with_loss: bool) -> list[_Site]:
    """Those of the registered hooks; without hooks, the outputs of all modules."""
    found: dict[tuple[str, str, int], _Site] = {}
    registrations = [r for r in core.table.registrations if r.kind != "tensor"]
    for r in registrations:
        if r.is_backward and not with_loss:
            continue
        function = r.hook_function
        site = _Site(r.name, r.kind, function.unpack_idx, function.expected_shape)
        found.setdefault((site.name, site.kind, site.unpack_idx), site)
    if not registrations:
        for name, _ in core.module.named_modules():
            name = clean(core.module, name)
            found.setdefault((name, "forward", 0), _Site(name, "forward", 0))
    if not found:
        raise ValueError(
            "verify: only backward hooks are registered; give loss=, a function of the model's "
            "output"
        )
    return list(found.values())


def _full_inputs(core: HookCore, args: Any, kwargs: Any) -> Any:
    """The inputs of the whole batch, on rank 0. Collective."""
    leaves, spec = tree_flatten((args, kwargs))
    channel, mesh = core.channel, core.mesh
    if channel.is_local:
        return args, kwargs
    tracker = LayoutTracker(mesh)
    tensors = list(tensors_of((args, kwargs)))
    core.tracking.seed(tracker, tensors)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        dp, tp = tracker.splits(leaf)
        row = torch.tensor(leaf.shape, dtype=torch.int64)
        shapes: list[Shape] = [tuple(shape) for shape in channel.exchange(row).tolist()]
        if dp is None or tp is None:
            raise ValueError(
                f"verify: input tensor of shape {tuple(leaf.shape)} is not the same on all "
                f"tensor-parallel ranks, nor rows of one batch (shapes by rank {shapes}); give "
                "every rank its rows, whole"
            )
        move = Move.of(channel, ShardLayout(dp), shapes, leaf.dtype)  # type: ignore[arg-type]
        full = move.gather_to_first(leaf.detach())
        if full is not None:
            leaves[i] = full.requires_grad_(leaf.requires_grad)
    return tree_unflatten(leaves, spec)


# ---- The two runs --------------------------------------------------------------------------------


def _run_reference(
    reference: Reference, sites: Sequence[_Site], given: Any, loss: Loss | None, flags: Tensor
) -> dict[str, list[Tensor]]:
    """Run the unsharded model on this process alone; its tensors, by the sites' numbers."""
    module: Any = reference
    if not isinstance(module, nn.Module) and callable(module):
        module = module()
    if not isinstance(module, nn.Module):
        raise TypeError(
            "verify: rank 0 needs the unsharded model, or a function that makes it, got "
            f"{type(module).__name__}"
        )
    core = _Looking(module, Mesh(), timeout_s=1.0)
    try:
        for i, site in enumerate(sites):
            flags[i, 0] = NOT_REACHED if _look(core, site, i) else NOT_IN_REFERENCE
        _run(core, _detached(given, next(module.parameters(), None)), loss)
    finally:
        core.close()
    for place, key in enumerate(core.found):
        flags[int(key)] = torch.tensor([EQUAL, place])
    return core.found


def _run_sharded(
    core: HookCore, sites: Sequence[_Site], wanted: Sequence[int], given: Any, loss: Loss | None
) -> tuple[dict[str, list[Tensor]], set[int]]:
    """Run the wrapped model without the user's hooks; rank 0's full tensors, and the sites whose
    layouts were not settled. Collective.
    """
    before = core.table.choices
    core.table.choose(_NOTHING, _NOTHING)
    looking = _Looking(core.module, core.mesh, core.channel.timeout_s)
    try:
        for i in wanted:
            _look(looking, sites[i], i)
        _run(looking, _detached(given, None), loss)
    finally:
        looking.close()
        core.table.choose(*before)
    return looking.found, {wanted[index] for index in looking.unsettled}


def _look(core: HookCore, site: _Site, number: int) -> bool:
    """Hook a site under its number; False if the model has no such module."""
    try:
        module = find_module(core.module, site.name)
    except ValueError:
        return False
    function = HookFunction(
        site.name, site.expected_shape, None, site.unpack_idx, output_name=str(number)
    )
    core.register(function, site.kind, [module])
    return True


def _run(core: HookCore, given: Any, loss: Loss | None) -> None:
    """A forward, and a backward if there is a loss, that leave no gradients behind."""
    args, kwargs = given
    with nullcontext() if loss is not None else torch.no_grad():
        run = core.begin(EVERYTHING)
        try:
            output = core.module(*args, **kwargs)
        except BaseException as error:
            core.end(run, error)
            raise
        core.end(run, None)
    if loss is None:
        return
    module: Any
    for module in core.module.modules():
        if fsdp.is_fsdp2(module):
            module.reshard()  # the root stays unsharded after a forward
    before = [(parameter, parameter.grad) for parameter in core.module.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        value: Any = loss(output)
        value.backward()
    finally:
        for parameter, grad in before:
            parameter.grad = grad


def _detached(given: Any, like: Tensor | None) -> Any:
    """The inputs, on the device of ``like``, so that no gradients reach the caller's tensors."""

    def detached(tensor: Tensor) -> Tensor:
        twin = tensor.detach() if like is None else tensor.detach().to(like.device)
        return twin.requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, detached, given)


def _compare(
    found: Sequence[Tensor], expected: Sequence[Tensor], rtol: float | None, atol: float
) -> Tensor:
    """Result, largest absolute and relative difference, and the call of the former."""
    row = torch.zeros(4, dtype=torch.float64)
    row[0] = EQUAL
    if len(found) != len(expected):
        row[0] = CALLS
        return row
    for call, (ours, theirs) in enumerate(zip(found, expected)):
        if ours.shape != theirs.shape:
            row[0], row[3] = SHAPES, call
            return row
        if not theirs.numel():
            continue
        wide = torch.complex128 if theirs.is_complex() or ours.is_complex() else torch.float64
        difference = (ours.to(wide) - theirs.to(wide)).abs()
        both_nan = ours.isnan() & theirs.isnan()
        same = both_nan | (ours == theirs)  # infinities too
        largest = difference.masked_fill(same, 0.0).nan_to_num(nan=torch.inf).max().item()
        scale = theirs.to(wide).abs().nan_to_num(nan=0.0, posinf=0.0).max().item()
        allowed = atol + (_tolerance(ours, theirs) if rtol is None else rtol) * scale
        if largest > allowed:
            row[0] = DIFFERS
        if largest >= row[1].item():
            row[1], row[3] = largest, call
            row[2] = largest / scale if scale else largest and torch.inf
    return row


def _tolerance(*tensors: Tensor) -> float:
    """For sums in another order: the two-thirds power of the coarser dtype's ``eps``."""
    eps = [torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point() or t.is_complex()]
    return max(eps, default=0.0) ** (2 / 3)
