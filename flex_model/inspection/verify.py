"""Compares a sharded model with the unsharded one, site by site: two runs, whose hooks are
read-only or edit as the user's do, and are removed afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from flex_model.distributed import values
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.header import Header
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Shape, ShardLayout
from flex_model.errors import ReplicasDifferError, is_agreed
from flex_model.hooks.core import HookCore
from flex_model.hooks.function import HookFunction
from flex_model.hooks.registration import Registration
from flex_model.hooks.table import EVERYTHING
from flex_model.hooks.user_function import on_copy
from flex_model.inspection import text
from flex_model.inspection.shapes_only import same_torch_random_state
from flex_model.inspection.tree import named
from flex_model.integrations import fsdp
from flex_model.layouts.exchange import exchange_chunks
from flex_model.layouts.sources import BatchDim
from flex_model.names import find_module

# The results of comparing a site.
EQUAL, DIFFERS, SHAPES, CALLS, NOT_IN_REFERENCE, NOT_REACHED, NOT_RESOLVED, REFUTED = range(8)
_WORDS = (
    "equal",
    "differs",
    "has another shape than in the reference",
    "is called a different number of times than in the reference",
    "is not in the reference",
    "has no tensor in this run",
    "its layout was not resolved: hook it to see the error",
    "ranks differ where they should hold one tensor: hook it to see the error",
)


@dataclass(frozen=True)
class SiteDifference:
    """The comparison of one site with the reference.

    Attributes:
        name, kind, unpack_idx: As in ``SiteLayout``.
        result: ``EQUAL``, ``DIFFERS`` or another constant of ``flex_model.inspection.verify``.
        max_abs: The largest absolute difference over all calls.
        max_relative: The same, divided by the reference's largest absolute value.
        call: The call with the largest difference, counted from 0.
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
        """Whether both models have the site, but with different values, shapes or call counts; or
        the ranks with different values where they should hold one tensor.
        """
        return self.result in (DIFFERS, SHAPES, CALLS, REFUTED)

    def __str__(self) -> str:
        site = f"{self.kind} of {text.site(self.name, self.unpack_idx)}"
        if self.result not in (EQUAL, DIFFERS):
            return f"{site} {_WORDS[self.result]}"
        return (
            f"{site} {_WORDS[self.result]}: largest difference {self.max_abs:.3g}, relative to the "
            f"largest value {self.max_relative:.3g}, in call {self.call}"
        )


@dataclass(frozen=True)
class VerifyReport(text.Printed):
    """The compared sites, in the reference's order of execution. The same on every rank."""

    rows: tuple[SiteDifference, ...]

    @property
    def is_equal(self) -> bool:
        """Whether no site differs."""
        return self.first_difference is None

    @property
    def first_difference(self) -> SiteDifference | None:
        """The first site, in the order of execution, that differs."""
        return next((row for row in self.rows if row.differs), None)

    def _blocks(self) -> Iterator[text.Table | str]:
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
        yield text.Table(["site", "kind", "max abs", "max relative", ""], cells)
        yield summary


def verify(
    core: HookCore,
    reference: Reference,
    args: Any,
    kwargs: Any,
    loss: Loss | None,
    rtol: float | None,
    atol: float,
    timeout_s: float,
    edits: bool,
) -> VerifyReport:
    """Run ``FlexModel.verify``. Collective over the mesh."""
    _check_arguments(loss, rtol=rtol, atol=atol, reference_timeout=timeout_s)
    if core.runs.is_inside:
        raise RuntimeError("verify: a run of this FlexModel is under way; call it before or after")
    communicator, mesh = core.communicator, core.mesh
    choose = sites_to_edit if edits else sites_to_compare
    sites = choose(core, with_loss=loss is not None)
    inputs = full_inputs(core, args, kwargs)

    expected: Found = {}
    flags = torch.zeros(len(sites), 2, dtype=torch.int64)
    with communicator.deadline(timeout_s):
        if mesh.group_rank == 0:
            try:
                expected, has_site = run_reference(core, reference, sites, inputs, loss, edits)
                flags = _flags(expected, has_site)
            except Exception as error:
                if communicator.is_local:
                    raise
                communicator.fail(f"verify: the reference failed: {error}", error)
        if not communicator.is_local:
            communicator.check_consistency(
                Header("inputs"), "verify, after the reference has run on rank 0"
            )
        flags = communicator.exchange(flags)[0]

    reached = [i for i in range(len(sites)) if flags[i, 0] == EQUAL]
    found, unresolved = run_sharded(core, sites, reached, (args, kwargs), loss, edits)
    table = torch.zeros(len(sites), 4, dtype=torch.float64)
    if mesh.group_rank == 0:
        for i, row in enumerate(table):
            result = unresolved.get(i, int(flags[i, 0]))
            row[0] = result
            if result == EQUAL:
                row[:] = _compare(found.get(str(i), []), expected[str(i)], rtol, atol)
    table = communicator.exchange(table)[0]
    order = sorted(range(len(sites)), key=lambda i: (flags[i, 0] != EQUAL, int(flags[i, 1]), i))
    rows = [_difference(sites[i], table[i].tolist()) for i in order]
    if not core.table.registrations:  # containers are not called
        rows = [row for row in rows if row.result != NOT_REACHED]
    return VerifyReport(tuple(rows))


def _check_arguments(loss: object, **numbers: object) -> None:
    """Check the arguments on every rank, since only rank 0 uses them in the comparison."""
    if loss is not None and not callable(loss):
        raise TypeError(f"verify: loss must be a function of the output or None, got {loss!r}")
    for name, value in numbers.items():
        if name == "rtol" and value is None:
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0:
            raise ValueError(f"verify: {name} must be a number of at least 0, got {value!r}")


def _flags(expected: Found, has_site: Sequence[bool]) -> Tensor:
    """Return a row (result so far, position in the reference's order) for each site."""
    flags = torch.zeros(len(has_site), 2, dtype=torch.int64)
    for i, is_site in enumerate(has_site):
        flags[i, 0] = NOT_REACHED if is_site else NOT_IN_REFERENCE
    for position, key in enumerate(expected):
        flags[int(key)] = torch.tensor([EQUAL, position])
    return flags


def _difference(site: Site, row: Sequence[float]) -> SiteDifference:
    result, max_abs, relative, call = row
    return SiteDifference(
        site.name, site.kind, site.unpack_idx, int(result), max_abs, relative, int(call)
    )


def _compare(
    found: Sequence[Tensor], expected: Sequence[Tensor], rtol: float | None, atol: float
) -> Tensor:
    """Return (result, largest absolute difference, relative difference, call with the largest)."""
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
        largest, scale = values.difference(ours, theirs)
        allowed = atol + (values.tolerance(ours, theirs) if rtol is None else rtol) * scale
        if largest > allowed:
            row[0] = DIFFERS
        if largest >= row[1].item():
            row[1], row[3] = largest, call
            row[2] = largest / scale if scale else largest and torch.inf
    return row


Loss = Callable[[Any], Tensor]
Reference = nn.Module | Callable[[], nn.Module] | None
Found = dict[str, list[Tensor]]  # by the index of the site


@dataclass(frozen=True)
class Site:
    """A compared tensor; of kind ``"gradient"``, the gradient of a trainable module's parameter.

    Attributes:
        hook: The user's hook that edits there; for a hook on several tensors, only at the first.
        is_with_last: Whether this is a further tensor of the previous site's hook.
        placements: Those that the user's hook states.
    """

    name: str
    kind: str
    unpack_idx: int
    expected_shape: Any = None
    hook: HookFunction | None = None
    is_with_last: bool = False
    placements: Mapping[str, Any] | None = None


def sites_to_compare(core: HookCore, with_loss: bool) -> list[Site]:
    """Return the sites of the registered hooks; without hooks, the outputs of all modules."""
    found: dict[tuple[str, str, int], Site] = {}
    registrations = [r for r in core.table.registrations if r.kind != "tensor"]
    for r in registrations:
        if r.is_backward and not with_loss:
            continue
        function = r.hook_function
        site = Site(
            r.name,
            r.kind,
            function.unpack_idx,
            function.expected_shape,
            placements=function.placements,
        )
        found.setdefault((site.name, site.kind, site.unpack_idx), site)
    if not registrations:
        found = {(name, "forward", 0): Site(name, "forward", 0) for name in named(core.module)}
    if not found:
        raise ValueError(
            "verify: only backward hooks are registered; give loss=, a function of the model's "
            "output"
        )
    return list(found.values())


def sites_to_edit(core: HookCore, with_loss: bool) -> list[Site]:
    """Return the sites of the registered hooks in order, then the model's output and, with a loss,
    the gradients of trainable modules.
    """
    found: list[Site] = []
    given = None
    for r in core.table.registrations:
        if r.kind != "tensor" and (with_loss or not r.is_backward):
            is_with_last, given = r.given is given, r.given
            hook = None if is_with_last else given
            index = r.hook_function.unpack_idx
            found.append(Site(r.name, r.kind, index, None, hook, is_with_last))
    found.append(Site("", "forward", 0))
    if with_loss:
        names = [name for name, value in core.modules.named_parameters() if value.requires_grad]
        found += [Site(name, "gradient", 0) for name in names]
    return found


def full_inputs(core: HookCore, args: Any, kwargs: Any) -> Any:
    """Return the inputs of the whole batch, on rank 0. Collective."""
    leaves, spec = tree_flatten((args, kwargs))
    communicator = core.communicator
    if communicator.is_local:
        return args, kwargs
    follower = core.tracking.follower()
    core.tracking.seed(follower, args, kwargs)
    values = [follower.value(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
    exchange_chunks(communicator, follower)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        dp, tp = follower.placements(values[i])
        row = torch.tensor(leaf.shape, dtype=torch.int64)
        shapes: list[Shape] = [tuple(shape) for shape in communicator.exchange(row).tolist()]
        if dp is None or tp is None:
            problem = "is not the same on all tensor-parallel ranks"
            if tp is not None:
                problem = "is neither proven to be rows of one batch nor equal on all ranks"
            raise ValueError(
                f"verify: input tensor of shape {tuple(leaf.shape)} {problem} (shapes by rank "
                f"{shapes}); give every data-parallel rank its own rows, unsharded along tp"
            )
        gather_spec = TensorSpec.of(communicator, ShardLayout(dp), shapes, leaf.dtype)
        full = gather_spec.gather_to_first(leaf.detach())
        if full is not None:
            leaves[i] = full.requires_grad_(leaf.requires_grad)
    return tree_unflatten(leaves, spec)


def _twin(hook: HookFunction, number: int) -> HookFunction:
    """Return a copy of a hook with the same edits, which records under this index and the following
    ones. The editing function gets the user's hook.
    """
    twin = copy.copy(hook)
    twin.output_name, twin._registrations = str(number), ()
    twin.members = tuple(_twin(member, number + i) for i, member in enumerate(hook.members))
    function = hook.editing_function
    if function is None:
        return twin

    def edit(module: Any, full: Tensor, save_ctx: Namespace, modules: Any) -> Tensor | None:
        own, parameters = (hook.save_ctx, hook.modules), hook.parameters
        hook.attach(hook._registrations, save_ctx, modules)
        hook.pass_parameters(twin.parameters)
        try:
            return function(module, full, save_ctx, modules)
        finally:
            hook.attach(hook._registrations, *own)
            hook.pass_parameters(parameters)

    twin.editing_function = functools.update_wrapper(edit, function, updated=())
    return twin


class SecondCore(HookCore):
    """A second HookCore besides the user's, on the same model or on the reference.

    Args:
        reads_only: Whether its hooks only read, and it continues where a layout can't be resolved.

    Attributes:
        unresolved: By index, the errors of registrations whose layout could not be resolved; the
            same on every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        save_ctx: Namespace,
        modules: nn.ModuleDict,
        edit_on: str,
        timeout_s: float,
        reads_only: bool,
        batch_dim: BatchDim,
    ) -> None:
        self.found: Found = {}
        self.unresolved: dict[int, Exception] = {}
        super().__init__(
            module,
            mesh,
            self.found,
            save_ctx,
            modules,
            edit_on,
            "rank0",
            timeout_s,
            batch_dim=batch_dim,
            on_failure=self._leave_out if reads_only else None,
            warns=False,  # the hooks may be on all modules, and the report lists those not called
        )

    def watch(self, site: Site, number: int) -> bool:
        """Hook a site, recorded under its index; False if the model has no such module."""
        if site.kind == "gradient":
            return True
        try:
            module = find_module(self.module, site.name)
        except ValueError:
            return False
        if site.is_with_last:
            return True
        if site.hook is not None:
            function = _twin(site.hook, number)
        else:
            function = HookFunction(
                site.name,
                site.expected_shape,
                None,
                site.unpack_idx,
                output_name=str(number),
                placements=site.placements,
            )
        self.register(function, site.kind, [module])
        return True

    def take_gradients(self, sites: Sequence[Site]) -> None:
        """Record the gradients of the trainable modules after a run."""
        gradients = {name: parameter.grad for name, parameter in self.modules.named_parameters()}
        for i, site in enumerate(sites):
            gradient = gradients[site.name] if site.kind == "gradient" else None
            if gradient is not None:
                self.found[str(i)] = [gradient.cpu()]

    def _leave_out(self, registration: Registration, error: Exception) -> None:
        """Leave out a site without a tensor, whose tensor can't be gathered, or whose layout is not
        known.
        """
        if is_agreed(error) and not isinstance(error, ValueError):
            raise error
        self.unresolved[registration.index] = error


def second_core(
    user: HookCore,
    module: nn.Module,
    mesh: Mesh,
    timeout_s: float,
    edits: bool,
    edit_on: str = "all",
) -> SecondCore:
    """Return a read-only core, or one that edits as the user's does, with its ``save_ctx`` and
    copies of its trainable modules. What the user states of the wrapped model holds there.
    """
    save_ctx, modules = Namespace(), nn.ModuleDict()
    if edits:
        save_ctx, modules = user.save_ctx, copy.deepcopy(user.modules)
        modules.zero_grad()
        edit_on = "all" if user.executor.edits_on_all else "rank0"
    batch_dim = user.tracking.batch_dim
    second = SecondCore(module, mesh, save_ctx, modules, edit_on, timeout_s, not edits, batch_dim)
    for statement in user.tracking.statements if module is user.module else ():
        second.tracking.state(statement)
    return second


@contextlib.contextmanager
def _restored_state(core: HookCore, edits: bool) -> Iterator[None]:
    """Restore ``save_ctx`` and the global random generators afterwards."""
    if not edits:
        yield
        return
    numpy_random = sys.modules.get("numpy.random")
    python_state = random.getstate()
    numpy_state = numpy_random.get_state() if numpy_random else None
    with same_torch_random_state(), on_copy(core.save_ctx):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy_random:
                numpy_random.set_state(numpy_state)


# ---- The two runs --------------------------------------------------------------------------------


def run_reference(
    core: HookCore,
    reference: Reference,
    sites: Sequence[Site],
    inputs: Any,
    loss: Loss | None,
    edits: bool,
) -> tuple[Found, list[bool]]:
    """Run the unsharded model on this process alone; return its tensors, and whether it has each
    site.
    """
    module: Any = reference
    if not isinstance(module, nn.Module) and callable(module):
        module = module()
    if not isinstance(module, nn.Module):
        raise TypeError(
            "verify: rank 0 needs the unsharded model, or a function that makes it, got "
            f"{type(module).__name__}"
        )
    if any(part is core.module for part in module.modules()):
        raise ValueError(
            "verify: the reference is the wrapped model itself; give an unsharded one with the "
            "same weights, loaded or copied before sharding"
        )
    parameter = next(module.parameters(), None)
    with _restored_state(core, edits):
        second = second_core(core, module, Mesh(), 1.0, edits)
        if parameter is not None:
            second.modules.to(parameter.device)
        try:
            has_site = [second.watch(site, i) for i, site in enumerate(sites)]
            run_once(second, detached(inputs, parameter), loss)
            second.take_gradients(sites)
        finally:
            second.close()
    return second.found, has_site


def run_sharded(
    core: HookCore,
    sites: Sequence[Site],
    reached: Sequence[int],
    inputs: Any,
    loss: Loss | None,
    edits: bool,
) -> tuple[Found, dict[int, int]]:
    """Run the wrapped model without the user's hooks; return rank 0's full tensors, and by index
    the results of sites whose layouts were not resolved. Collective.
    """
    with core.table.nothing_chosen(), _restored_state(core, edits):
        second = second_core(core, core.module, core.mesh, core.communicator.timeout_s, edits)
        try:
            for i in reached:
                second.watch(sites[i], i)
            run_once(second, detached(inputs, None), loss)
            second.take_gradients(sites)
        finally:
            second.close()
    results = {
        reached[i]: REFUTED if isinstance(error, ReplicasDifferError) else NOT_RESOLVED
        for i, error in second.unresolved.items()
    }
    return second.found, results


def run_once(
    core: HookCore, inputs: Any, loss: Loss | None, after: Callable[[], None] | None = None
) -> None:
    """Run a forward, and a backward if there is a loss, and ``after`` it; restore the parameters'
    gradients.
    """
    args, kwargs = inputs
    gradients = contextlib.nullcontext() if loss is not None else torch.no_grad()
    with gradients, core.runs.active(EVERYTHING):
        output = core.module(*args, **kwargs)
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
        if after is not None:
            after()
    finally:
        for parameter, grad in before:
            parameter.grad = grad


def detached(inputs: Any, like: Tensor | None) -> Any:
    """Return the inputs on the device of ``like``, detached from the caller's tensors."""

    def twin_of(tensor: Tensor) -> Tensor:
        twin = tensor.detach() if like is None else tensor.detach().to(like.device)
        return twin.requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, twin_of, inputs)
