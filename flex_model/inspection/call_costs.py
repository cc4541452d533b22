"""What calls of hooks add to a run: the real executor runs them on tensors without values, with the
communicators of all ranks of a stage in one process, and their transfers are recorded.
"""

from __future__ import annotations

import functools
import itertools
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from flex_model._C import GatherPlan
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.costs import Cost, Spent
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.header import Header
from flex_model.distributed.mesh import Axis, Mesh
from flex_model.distributed.picked import Pick
from flex_model.distributed.placement import Placement, Replicate, Shape, ShardLayout
from flex_model.distributed.transports.transport import Gathered
from flex_model.hooks.function import HookFunction
from flex_model.hooks.hook_call import HookCall
from flex_model.hooks.hook_executor import HookExecutor
from flex_model.hooks.layout_finder import LayoutFinder
from flex_model.hooks.registration import Joint, Registration
from flex_model.integrations.torch_private import FakeTensor, FakeTensorMode, unset_fake_temporarily
from flex_model.layouts.expected_shape import rows_dim
from flex_model.layouts.statements import Statements
from flex_model.records.records import Records
from flex_model.runs.run import Run
from flex_model.selection import Select

if TYPE_CHECKING:
    from flex_model.hooks.core import HookCore


class RecordingCommunicator(Communicator):
    """The communicator of one rank, which moves nothing. The ranks of a stage record one after the
    other: each sees headers equal to its own, but those of rank 0, which is the first.

    Args:
        mode: Makes tensors without values.
        headers: Those of rank 0, in their order; of all these communicators.
    """

    def __init__(self, mesh: Mesh, mode: FakeTensorMode, headers: list[bytes]) -> None:
        self.mode, self._headers = mode, headers
        super().__init__(mesh, timeout_s=0.0)
        self.begin()

    def begin(self) -> None:
        """Begin a recording."""
        self.begin_run()
        self._num_headers = 0
        if self.mesh.group_rank == 0:
            self._headers.clear()

    def connect(self) -> None:
        """Do nothing: the other ranks are here."""

    def transport(self, axes: tuple[Axis, ...]) -> Any:
        places = self.mesh.ranks_along(axes)
        return WithoutValues(places.index(self.mesh.group_rank), len(places))

    def check_consistency(self, header: Header, where: str) -> list[Header]:
        with unset_fake_temporarily():
            return super().check_consistency(header, where)

    def call(
        self,
        transfer: str | Callable[..., Any],
        axes: tuple[Axis, ...],
        *args: Any,
        num_bytes: int = 0,
    ) -> Any:
        """Return what the transfer would, with the values of this rank alone."""
        assert isinstance(transfer, str)
        if transfer not in ("exchange", "exchange_bytes"):
            return getattr(self.transport(axes), transfer)(*args)
        (own,), size = args, len(self.mesh.stage_ranks)
        if isinstance(own, bytes):
            if self._num_headers == len(self._headers):
                self._headers.append(own)
            self._num_headers += 1
            return [self._headers[self._num_headers - 1], *[own] * (size - 1)]
        with unset_fake_temporarily():
            if isinstance(own, FakeTensor):
                own = torch.zeros(own.shape, dtype=own.dtype, device="cpu")
            return torch.stack([own] * size)


class WithoutValues:
    """See ``Transport``: tensors of the right shapes."""

    name = "shared_memory"

    def __init__(self, rank: int, size: int) -> None:
        self.group = Namespace(rank=rank, size=size)

    def exchange(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty((self.group.size, *tensor.shape))

    def all_gather(
        self, shard: Tensor, plan: GatherPlan, num_copies: int = 1, num_read: int = 0
    ) -> list[Tensor]:
        return [shard.new_empty(plan.full_sizes) for _ in range(num_copies)]

    def gather_to_first(self, tensors: list[Gathered]) -> list[Tensor] | None:
        if self.group.rank > 0:
            return None
        return [t.shard.new_empty(t.plan.full_sizes) for t in tensors for _ in range(t.num_copies)]

    def scatter_from_first(self, full: Tensor | None, like: Tensor, plan: GatherPlan) -> Tensor:
        return torch.empty_like(like)

    def broadcast(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        return torch.empty_like(like) if tensor is None else tensor

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)


def is_of_gradient(kind: str) -> bool:
    """Whether hooks of this kind are called in the backward."""
    return kind not in ("forward", "forward_pre")


@dataclass(frozen=True)
class HookedTensor:
    """A tensor that a hook sees, on all ranks.

    Attributes:
        kind, edits: As in ``Registration``; ``records``, ``select``: as in ``HookFunction``.
        shapes: Those of all ranks' parts.
        is_mean: Of a parameter's gradient: whether data-parallel ranks have averaged it before.
    """

    kind: str
    edits: bool
    records: bool
    select: Select | None
    layout: ShardLayout
    shapes: tuple[Shape, ...]
    dtype: torch.dtype
    needs_gradient: bool
    is_mean: bool

    @property
    def is_gradient(self) -> bool:
        return is_of_gradient(self.kind)

    def spec(self, communicator: Communicator) -> TensorSpec:
        """The spec on one rank; errors are those of ``TensorSpec.of``."""
        shapes = list(self.shapes)
        return TensorSpec.of(communicator, self.layout, shapes, self.dtype, self.select)


Both = tuple[Cost, Cost]  # of the forward and of the backward


@dataclass(frozen=True)
class CallCosts:
    """Records what calls whose layouts are known add to a run of a FlexModel.

    Attributes:
        edits_on_all: Whether every rank edits, not rank 0 alone.
        records_on_all, keeps_parts: As in ``Records``.
        rows_dim: The dim in which data-parallel ranks hold rows.
        statements: The layouts that the user states.
    """

    mesh: Mesh
    edits_on_all: bool = True
    records_on_all: bool = False
    keeps_parts: bool = False
    rows_dim: int | None = 0
    statements: Statements | None = None

    @staticmethod
    def of(core: HookCore) -> CallCosts:
        """Return those of the calls of a FlexModel's hooks. Local."""
        records = core.records
        return CallCosts(
            core.mesh,
            core.executor.edits_on_all,
            records.on_all_ranks,
            records.keeps_parts,
            rows_dim(core.tracking.batch_dim),
            core.tracking.statements,
        )

    @functools.cached_property
    def communicators(self) -> list[RecordingCommunicator]:
        """Those of the ranks of the stage."""
        mode, headers = FakeTensorMode(allow_non_fake_inputs=True), list[bytes]()
        meshes = [
            replace(self.mesh, rank=self.mesh.rank_at(i)) for i in range(len(self.mesh.stage_ranks))
        ]
        return [RecordingCommunicator(mesh, mode, headers) for mesh in meshes]

    def of_run(
        self, calls: Mapping[str, Sequence[HookedTensor]], begins: bool, has_backward: bool
    ) -> tuple[dict[str, list[Both]], Both]:
        """Return what each tensor of each call adds, and what all hooks share.

        Args:
            calls: By key, the tensors of a call: there are several if one function edits them
                together.
            begins: Whether a header with the key of the layouts begins the forward.
            has_backward: Whether hooks on gradients have the backward end with a header.
        """
        ranks = [_Rank(self, to, list(calls.values())) for to in self.communicators]
        for _ in range(2):  # the second one has no layouts and sizes left to exchange
            forward, shared = _recorded(ranks, lambda rank: rank.forward(begins))
            backward, shared_then = _recorded(ranks, lambda rank: rank.backward(has_backward))
        found = {
            key: [(forward[one.site], backward[one.site]) for one in registrations]
            for key, registrations in zip(calls, ranks[0].registrations)
        }
        return found, (shared, shared_then)


def _recorded(ranks: Sequence[_Rank], run: Callable[[_Rank], None]) -> tuple[dict[int, Cost], Cost]:
    """Call ``run`` for each rank; return what each hook's site adds to its costs, and the rest."""
    for rank in ranks:
        rank.communicator.begin()
        with rank.communicator.mode:
            run(rank)
    spent, kept = [rank.communicator.meter.spent for rank in ranks], ranks[0].take_record_bytes()

    def cost(site: int) -> Cost:
        of_ranks = [of_rank.get(site, Spent()) for of_rank in spent]
        num_bytes = tuple(one.num_bytes for one in of_ranks)
        moved = num_bytes if any(num_bytes) else ()
        return Cost(of_ranks[0].headers, of_ranks[0].payloads, moved, kept.get(site, 0))

    shared = map(cost, set().union(*spent) - kept.keys())
    return {site: cost(site) for site in kept}, replace(sum(shared, Cost()), bytes_by_rank=())


class _Rank:
    """The hooks on one rank.

    Args:
        calls: As of ``CallCosts.of_run``.

    Attributes:
        registrations: By call.
    """

    def __init__(
        self,
        setup: CallCosts,
        communicator: RecordingCommunicator,
        calls: Sequence[Sequence[HookedTensor]],
    ) -> None:
        self._calls, self.communicator = calls, communicator
        self.registrations = [_registered(tensors, i) for i, tensors in enumerate(calls)]
        place = communicator.mesh.group_rank
        self._shapes = [[tensor.shapes[place] for tensor in tensors] for tensors in calls]
        each = zip(itertools.chain(*calls), itertools.chain(*self.registrations))
        specs = {registration.site: tensor.spec(communicator) for tensor, registration in each}
        self._layouts = cast(LayoutFinder, _KnownLayouts(specs))
        ranks = "all" if setup.records_on_all else "rank0"
        self._records = Records({}, communicator, ranks)
        self._records.keep_parts(setup.keeps_parts)
        unused: Any = None
        self._executor = HookExecutor(
            communicator,
            self._records,
            Namespace(),
            {},
            edit_on="all" if setup.edits_on_all else "rank0",
            full_parameter=unused,
            tracking=unused,
            checks_edits=False,
            sent_to_all=None,
            layouts=self._layouts,
        )
        self._edited: list[tuple[list[Tensor], tuple[Tensor, ...]]] = []

    def forward(self, begins: bool) -> None:
        """Run the hooks of a forward, and its end."""
        run, self._edited = Run(seed=1), []
        if begins:
            self._header()
        for tensors, registrations, shapes in zip(self._calls, self.registrations, self._shapes):
            if tensors[0].is_gradient:
                continue
            with torch.set_grad_enabled(any(tensor.needs_gradient for tensor in tensors)):
                leaves = [_made(*one) for one in zip(tensors, shapes)]
                tree: Any = tuple(leaves)
                for registration, leaf in zip(registrations, leaves):
                    call = HookCall(registration, None, run)
                    tree = self._executor.activation(call, leaf, tree)
            self._edited.append((leaves, tree))
        self._end(run, "end of the run")
        if self._records.keeps_parts:
            self._header()

    def backward(self, ends: bool) -> None:
        """Run the hooks of the backward, that of the edits in the forward before, and its end."""
        run = Run(seed=1)
        for leaves, edited in self._edited:
            outputs = [tensor for tensor in edited if tensor.requires_grad]
            inputs = [leaf for leaf in leaves if leaf.requires_grad]
            grads = [torch.empty_like(tensor) for tensor in outputs]
            if outputs:
                torch.autograd.grad(outputs, inputs, grads)
        for tensors, registrations, shapes in zip(self._calls, self.registrations, self._shapes):
            if tensors[0].is_gradient:
                (tensor,), (registration,), (shape,) = tensors, registrations, shapes
                with torch.no_grad():
                    grad = torch.empty(shape, dtype=tensor.dtype, device="cpu")
                    self._executor.gradient(HookCall(registration, None, run), grad)
        if ends:
            self._end(run, "end of the backward")

    def _header(self) -> None:
        if not self.communicator.is_local:
            self.communicator.check_consistency(Header("forward"), "")

    def _end(self, run: Run, kind: str) -> None:
        if not self.communicator.is_local:
            self._records.join(run, kind, self._layouts.lookup)

    def take_record_bytes(self) -> dict[int, int]:
        """The bytes of the records since the last call, by site."""
        records = self._records.take()
        return {
            one.site: sum(
                full.nbytes
                for full in records.get(one.hook_function.record_name, [])
                if isinstance(full, Tensor)
            )
            for one in itertools.chain(*self.registrations)
        }


class _KnownLayouts:
    """See ``LayoutFinder``; that of edits' gradients is that replicas hold them in full."""

    def __init__(self, specs: dict[int, TensorSpec]) -> None:
        self._specs = specs  # by site

    def shard_of(self, call: HookCall, leaf: Tensor) -> tuple[HookCall, Tensor, None]:
        return call, leaf, None

    def pick_of_full(self, call: HookCall, leaf: Tensor) -> Pick | None:
        return self._specs[call.registration.site].pick

    def pick_of_shard(self, *of_call: Any) -> None:
        """The end of the run takes it out: the same bytes move."""

    def lookup(self, call: HookCall, *of_tensors: Any) -> tuple[TensorSpec, Tensor]:
        return self._specs[call.registration.site], of_tensors[-1]

    def of_edit_gradient(
        self, call: HookCall, grad: Tensor | None, layout: ShardLayout
    ) -> Placement:
        return Replicate()


def _registered(tensors: Sequence[HookedTensor], number: int) -> list[Registration]:
    """Stand-ins for the registrations of the hooks of one call."""
    first, indices = tensors[0], tuple(range(len(tensors)))
    function = HookFunction(
        f"hook {number}",
        None,
        _edit if first.edits else None,
        indices,
        select=[tensor.select for tensor in tensors],
        record=first.records,
    )
    # A mean over data-parallel ranks is passed as the gradient of an activation.
    kind = "full_backward_pre" if first.is_mean else first.kind
    joint = Joint(indices)
    return [
        Registration(member, kind, i, number, None, function, member.module_name, joint)
        for i, member in enumerate(function.members)
    ]


def _edit(module: nn.Module | None, fulls: Sequence[Tensor], save_ctx: Any, modules: Any) -> Any:
    """Stands for the user's function, and changes all tensors."""
    return tuple(full.clone() for full in fulls)


def _made(tensor: HookedTensor, shape: Shape) -> Tensor:
    needs = tensor.needs_gradient
    return torch.empty(shape, dtype=tensor.dtype, device="cpu", requires_grad=needs)
