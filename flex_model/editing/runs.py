"""Runs of a FlexModel with the temporary hooks of an experiment."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from flex_model import pytree
from flex_model.distributed.agreement import check_equal, gather_checked
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.editing.edit import Edit, Scope
from flex_model.editing.patching import Capture
from flex_model.editing.region import Region
from flex_model.errors import HookError, agreed
from flex_model.hooks.function import HookFunction
from flex_model.hooks.groups import ALL, as_names
from flex_model.inspection.second_core import check_backward, detached, no_gradients_kept
from flex_model.integrations import fsdp2
from flex_model.integrations.torch_private import FakeTensor, current_graph_task
from flex_model.model import FlexModel
from flex_model.names import check_name
from flex_model.records.records import drop
from flex_model.records.store import ActivationStore
from flex_model.runs.graphs import leaves_between
from flex_model.runs.step import current_microbatch
from flex_model.selection.selectors import SelectionArguments, is_everything, is_int

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
Metric = Callable[[Tensor], Any]
_PREFIX = "flex_model.editing"


@dataclass(frozen=True)
class Site:
    """An input or output tensor of a module, or a part of it.

    Example::

        Site("model.layers.3")                                                      # its output
        Site("model.layers.3.self_attn.o_proj", "input", {"heads": 2, "num_heads": 8})

    Args:
        module: The module's name in the unsharded model.
        side: "output" or "input".
        where: The selected part; see `SelectionArguments`.
        unpack_idx, expected_shape: As in HookFunction.
    """

    module: str
    side: str = "output"
    where: SelectionArguments = field(default_factory=SelectionArguments)
    unpack_idx: int | str = 0
    expected_shape: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        if self.side not in ("output", "input"):
            raise ValueError(f"Site: side must be 'output' or 'input', got {self.side!r}")
        check_name(self.module, "module")
        if not isinstance(self.where, Mapping):
            raise TypeError(f"Site: where must be a mapping, got {type(self.where).__name__}")
        Region(**self.where)


def as_site(site: Site | str, side: str = "output") -> Site:
    """Return a Site; of a module's name, this side of it."""
    if isinstance(site, str):
        return Site(site, side)
    if not isinstance(site, Site):
        raise TypeError(f"expected a Site or a module's name, got {type(site).__name__}")
    return site


def whole_site(site: Site | str) -> Site:
    """Return a Site whose whole tensor is used; ValueError if it selects a part."""
    site = as_site(site)
    if not Region(**site.where).is_whole:
        raise ValueError(
            f"the whole tensor of {site.module!r} is used here; leave all but dims= out of its "
            "where="
        )
    return site


def as_sites(sites: Iterable[Site | str], what: str, side: str = "output") -> tuple[Site, ...]:
    if isinstance(sites, (str, Site)) or not isinstance(sites, Iterable):
        raise TypeError(
            f"{what} must be a list of Sites or names of modules, got {sites!r}; for one site give "
            f"[{sites!r}]"
        )
    return tuple(as_site(site, side) for site in sites)


def as_arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        raise TypeError(
            "the inputs of a run must be a tensor, a sequence of positional or a mapping of "
            f"keyword arguments, got {inputs!r}"
        )
    return tuple(inputs), {}


def check_left_out(sites: Iterable[Site], name: str, why: str) -> None:
    """ValueError if a site selects rows or positions, ``name``."""
    for site in sites:
        if not is_everything(site.where.get(name)):
            raise ValueError(f"{why}; leave {name}= out of the where= of {site.module!r}")


def check_counts_in_call(sites: Iterable[Site], what: str) -> None:
    """ValueError if a site counts positions in a sequence: a forward is over when it is needed."""
    for site in sites:
        if Region(**site.where).counts_sequence:
            raise ValueError(f"{what} counts positions in one call; leave out of='sequence'")


def check_count(value: object, what: str) -> None:
    """ValueError for another value than a positive integer; ``what``: "batch ... of patches"."""
    if not is_int(value) or value < 1:  # type: ignore[operator]
        raise ValueError(f"{what}, got {value!r}")


def check_metric(metric: object) -> None:
    if not callable(metric):
        raise TypeError(f"metric must be a function of the output, got {metric!r}")


def check_takes_gradients(flex: FlexModel, what: str) -> None:
    """Raise an error for a FlexModel in which a metric has no gradient on every rank."""
    flex._runner.check_runs_whole_model(what)
    if not flex._core.executor.edits_on_all:
        raise ValueError(
            f"{what}: with edit_on='rank0' the metric would be on rank 0 only; wrap the model with "
            "edit_on='all'"
        )


NO_GRADIENT = (
    "{}: no gradient reaches {}; let parameters before it require one "
    "(flex.wrapped_module_requires_grad()), and leave torch.no_grad() outside; leave out sites on "
    "which the metric does not depend"
)


class Runs:
    """A context in which an experiment registers hooks in groups, and runs the model with some."""

    def __init__(self, flex: FlexModel, groups: Iterable[str]) -> None:
        if flex._runner.is_running:
            raise RuntimeError(
                "an experiment runs the model itself; call it outside of active(), forward passes "
                "and editing functions, and name further hooks with groups="
            )
        if isinstance(flex.output_ptr, ActivationStore):
            raise TypeError(
                "an experiment reads its records after each run, and those of this FlexModel go to "
                f"the store {flex.output_ptr.folder}; wrap the model with a dict as output_ptr"
            )
        self._records = flex.output_ptr
        self._flex, self._groups = flex, as_names(groups)
        self._stack = contextlib.ExitStack()
        self._sites: dict[str, str] = {}  # record name -> module
        self._calls: Counter[tuple[str, int | None]] = Counter()  # of edits, by micro-batch
        self._error: BaseException | None = None
        if ALL in self._groups:  # the hooks of now: those of the experiment are in "all", too
            users, name = flex.get_group_hook_functions(ALL), f"{_PREFIX}.{ALL}"
            self._groups = [group for group in self._groups if group != ALL]
            if users:
                self._groups.append(name)
                flex.update_hook_groups(users, name)
                self._stack.callback(flex.remove_hook_groups, users, name)

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
        for name in self._sites:
            drop(self._records, name)

    def check_shapes(self, clean: Inputs, corrupted: Inputs) -> None:
        """ValueError, on every rank, if the inputs of two runs differ in shape. Collective."""

        def check() -> None:
            shapes = [
                [tuple(leaf.shape) for leaf in pytree.flatten(as_arguments(inputs))[0]]
                for inputs in (clean, corrupted)
            ]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"the inputs of the two runs differ in shape: {shapes[0]} and {shapes[1]}; pad "
                    "them, so that a position means the same in both"
                )

        gather_checked(self._flex._communicator, "an experiment", check)

    def in_step(self, batches: Iterable[Inputs]) -> Iterator[Inputs]:
        """Yield the batches; HookMismatchError, on every rank, if one has fewer. Collective."""
        remaining = iter(batches)
        while True:
            batch = list(itertools.islice(remaining, 1))
            check_equal(self.exchange(bool(batch)), "whether a batch is left")
            if not batch:
                return
            yield batch[0]

    def register(
        self,
        site: Site,
        edit: Edit | None,
        group: str,
        name: str | None = None,
        is_gradient: bool = False,
    ) -> None:
        name = f"{_PREFIX}:{name or f'#{len(self._sites)}'}"
        settings: dict[str, Any] = {
            "expected_shape": site.expected_shape,
            "unpack_idx": site.unpack_idx,
            "output_name": name,
            "record": edit is None,
        }
        hook = (
            HookFunction(site.module, **settings)
            if edit is None
            else self._counted(edit, name, is_gradient).at(site.module, **settings)
        )
        kinds = ("forward", "forward_pre")
        if is_gradient:
            kinds = ("full_backward_pre", "full_backward")
        kind = kinds[site.side == "input"]
        handle = getattr(self._flex, f"register_{kind}_hook")(hook)
        self._stack.callback(handle.remove)
        self._flex.update_hook_groups([hook], f"{_PREFIX}.{group}")
        self._sites[name] = site.module

    def _counted(self, edit: Edit, name: str, is_gradient: bool) -> Edit:
        """Return an edit that counts its calls; of a forward hook not those of a recomputation."""

        def apply(full: Tensor, scope: Scope) -> Tensor:
            is_in_backward = current_graph_task() != -1
            if is_gradient == is_in_backward and not isinstance(full, FakeTensor):
                self._calls[name, current_microbatch()] += 1
            return edit.apply(full, scope)

        return Edit(repr(edit), apply, edit.parameters)

    def capture(self, site: Site, group: str) -> Capture:
        kept = Capture()
        self.register(site, kept, group)
        return kept

    def watch(self, site: Site, name: str, group: str = "", is_gradient: bool = False) -> None:
        """Register a read-only hook that records the site under ``name``."""
        self.register(site, None, group or name, name, is_gradient)

    def run(self, inputs: Inputs, *groups: str, **further: Any) -> None:
        # The caller's tensors keep their graph and `.grad`.
        args, kwargs = detached(as_arguments(inputs), None)
        chosen = [*self._groups, *(f"{_PREFIX}.{group}" for group in groups)]
        self._calls.clear()
        self._flex(*args, groups=chosen, **kwargs, **further)
        self._check_calls()

    def _check_calls(self) -> None:
        """ValueError, on every rank, if a site was called several times in the last run: what one
        call gave would stand for all. Collective.
        """
        numbers = {name: len(self._records.get(name) or ()) for name in self._sites}
        for (name, _), number in self._calls.items():
            numbers[name] = max(numbers[name], number)
        several = [(self._sites[name], number) for name, number in numbers.items() if number > 1]
        for found in self.exchange(several):
            for module, number in found:
                raise agreed(
                    ValueError(
                        f"{module!r} is called {number} times in one forward; choose modules that "
                        "are called once"
                    )
                )

    def measure(self, inputs: Inputs, metric: Metric, name: str, *groups: str) -> float:
        """Run, then return the metric of a record on rank 0, and 0 on other ranks. If the metric
        fails, ``on_rank_0`` raises later, on all ranks.
        """
        self.run(inputs, name, *groups)
        return self.metric_of(metric, name)

    def metric_of(self, metric: Metric, name: str) -> float:
        """Return the metric of a record of the last run, as ``measure`` does. Local."""

        def compute() -> float:
            record = self.record(name)
            assert record is not None
            return float(metric(record))

        return self.attempt(compute) or 0.0

    def attempt(self, compute: Callable[[], Any]) -> Any:
        """Compute on rank 0, and return the result; None elsewhere, and after an error, which
        ``on_rank_0`` raises later, on all ranks. Local.
        """
        if not self.is_rank_0 or self._error is not None:
            return None
        try:
            return compute()
        except Exception as error:
            self._error = error
            return None

    def group_edits(self) -> Iterator[tuple[str, HookFunction]]:
        """Yield the hooks of the user's groups that have editing functions, each with its group."""
        for group in self._groups:
            for hook in self._flex.get_group_hook_functions(group):
                if hook.editing_function is not None:
                    yield group.removeprefix(f"{_PREFIX}."), hook

    def check_no_group_edits(self, what: str) -> None:
        """ValueError if the user's groups have editing functions."""
        for name, hook in self.group_edits():
            raise ValueError(
                f"{what}: the edit of {hook.module_name!r} in group {name!r} would get "
                "the copies of the rows as one batch; leave out batch="
            )

    def backward(self, loss: object, what: str) -> None:
        """Run the backward of a metric."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"{what}: the metric must be a tensor of one number")
        if not loss.requires_grad:
            raise ValueError(NO_GRADIENT.format(what, "the metric"))
        with no_gradients_kept(leaves_between([], loss)):  # of a probe in the metric
            loss.backward()
        self._check_calls()

    def record(self, name: str) -> Tensor | None:
        """Return the record of the last run; None on ranks without records."""
        records = self._records.get(f"{_PREFIX}:{name}")
        return records[0] if records else None

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Collective."""
        return exchange_json(self._flex._communicator, value, "an experiment")

    @property
    def dp_size(self) -> int:
        """The number of data-parallel ranks."""
        return self._flex._communicator.mesh.dp_size

    @property
    def rows_dim(self) -> int:
        """The dim of the inputs that holds rows.

        Raises:
            ValueError: it is not one.
            RuntimeError: the runs are steps of a pipeline.
        """
        self._flex._runner.check_runs_whole_model("batch=")
        dim = self._flex._core.tracking.batch_dim
        if not isinstance(dim, int):
            raise ValueError(
                "batch: rows are repeated, which needs one FlexModel(batch_dim=) for all inputs; "
                "leave out batch="
            )
        return dim

    @property
    def is_rank_0(self) -> bool:
        """Whether this rank computes metrics."""
        return self._flex._communicator.mesh.group_rank == 0

    def on_rank_0(self, compute: Callable[[], Any], kind: type[Exception] = HookError) -> Any:
        """Compute on rank 0; return the result, or raise its error, on every rank. Collective."""
        result, text = self.attempt(compute), None
        if self._error is not None:
            text = str(self._error) if kind is not HookError else repr(self._error)
        text, result = self.exchange([text, result])[0]
        if text is not None:
            what = f"the metric failed on rank 0: {text}" if kind is HookError else text
            raise agreed(kind(what)) from self._error
        return result

    @contextlib.contextmanager
    def restored_gradients(self, what: str) -> Iterator[None]:
        """Set the parameters' gradients to None inside, and restore them afterwards. Collective.

        Raises:
            ValueError: a backward would change more; on every rank.
        """
        flex = self._flex
        check_backward(flex._core, what)
        parameters = [*fsdp2.kept_parameters(flex.module), *flex.trainable_modules.parameters()]
        with no_gradients_kept(parameters), contextlib.ExitStack() as stack:
            for module in flex.module.modules():
                if isinstance(module, nn.parallel.DistributedDataParallel):
                    stack.enter_context(module.no_sync())  # they are dropped, and may be None
            yield
