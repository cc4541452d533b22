"""A run of a model on the example, and what it shows: where it can be split, which modules it
calls, what they return, and how the hidden state passes the boundaries. The run changes nothing of
the model.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from flex_model import pytree
from flex_model.errors import nearest
from flex_model.integrations.absent_tensor import Absent, names_in, present, without_values
from flex_model.integrations.keyword_arguments import takes_keyword
from flex_model.integrations.torch_private import unchanged
from flex_model.pipelining.splitting.clones import clone_tree


class ComparableRun(TorchFunctionMode):
    """Dropout does nothing, and nothing is drawn: a stage may then be compared with the model."""

    _DROPOUTS = (
        F.dropout,
        F.alpha_dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.feature_alpha_dropout,
        torch.dropout,
        torch.dropout_,
    )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in self._DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


@contextmanager
def quietly(model: nn.Module) -> Iterator[None]:
    """Nothing of the model changes, no gradients, no dropout."""
    with unchanged(model), warnings.catch_warnings(), ComparableRun():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # checkpoint
        yield


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors of an output, in order."""
    return pytree.flatten(output)[0]


def find_difference(got: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """How two outputs differ; None if they do not: bit for bit where kernels are deterministic, and
    some of those on a GPU are not.
    """
    if len(got) != len(expected):
        return f"{len(got)} tensors, not {len(expected)}"
    for ours, theirs in zip(got, expected):
        if theirs.is_meta and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype):
            continue  # no values to compare
        try:
            torch.testing.assert_close(ours, theirs, equal_nan=True)
        except AssertionError as error:
            lines = str(error).splitlines()
            return next((line for line in lines if "Greatest absolute" in line), lines[0])
    return None


@dataclass(frozen=True)
class Crossing:
    """How the hidden state passes a boundary.

    Attributes:
        argument: Index of the leaf in the arguments of the block behind the boundary.
        hidden: What it was on the example, without values.
    """

    argument: int
    hidden: Tensor


@dataclass(frozen=True)
class Recording:
    """What the run showed.

    Attributes:
        args, kwargs: The example, with keyword arguments that are always these
            (``use_cache=False``): ``fixed``.
        signature: Of the model's forward.
        answer: The tensors that the model returned.
        calls: Names of the modules called, in order of the calls' beginnings.
        outputs: By name, what its first call returned, without values.
        blocks: Where the model is split.
        crossings: How the hidden state passes each boundary.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fixed: dict[str, Any]
    signature: inspect.Signature
    answer: list[Tensor]
    calls: list[str]
    outputs: dict[str, Any]
    blocks: BlockList
    crossings: list[Crossing]

    def positional(self) -> dict[str, Any]:
        """The positional arguments, which only the first stage gets, by name, without values."""
        bound = self.signature.bind_partial(*self.args).arguments
        return {name: without_values(value) for name, value in bound.items()}


def record(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split_spec: Mapping[str, SplitPoint],
) -> Recording:
    """Run the model on the example. ValueError if it can't be split at these points."""
    twin = clone_tree(model)
    fixed = {"use_cache": False} if takes_keyword(twin, "use_cache") else {}
    kwargs = {**kwargs, **fixed}
    lists = {name.rpartition(".")[0] for name in split_spec}
    calls: list[str] = []
    given: dict[str, dict[int, Tensor]] = {}
    outputs: dict[str, Any] = {}

    def hooks_of(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        is_block = bool(name) and name.rpartition(".")[0] in lists

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            calls.append(name)
            leaves = enumerate(_pytree.tree_leaves((args, kwargs)))
            given[name] = {
                index: without_values(leaf) for index, leaf in leaves if isinstance(leaf, Tensor)
            }
            return _pytree.tree_map_only(Absent, present, (args, kwargs)) if is_block else None

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            outputs.setdefault(name, without_values(output))
            if not is_block:
                return None
            return _pytree.tree_map_only(Tensor, lambda x: Absent(x, {name}, x.device), output)

        return before, after

    with ExitStack() as stack:
        for name, module in twin.named_modules():
            before, after = hooks_of(name)
            stack.enter_context(
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            )
            stack.enter_context(module.register_forward_hook(after))
        answer = [present(tensor) for tensor in tensors_in(twin(*args, **kwargs))]
    if not answer:
        raise ValueError(
            f"{type(model).__name__} returns no tensor on the example; a pipeline's last stage "
            "must return some"
        )
    blocks = find_block_list(model, split_spec, calls)
    crossings = [_find_crossing(model, given, blocks, index) for index in blocks.boundaries]
    signature = inspect.signature(twin.forward)
    return Recording(args, kwargs, fixed, signature, answer, calls, outputs, blocks, crossings)


def _find_crossing(
    model: nn.Module, given: dict[str, dict[int, Tensor]], blocks: BlockList, boundary: int
) -> Crossing:
    name, own = blocks.blocks[boundary], given[blocks.blocks[boundary]]
    if len(blocks.blocks) > 1:  # block 0 is given it where the others are
        of_block = given[blocks.blocks[max(boundary, 1)]]
        found = [index for index, one in of_block.items() if names_in(one)]
    else:
        found = [index for index, one in own.items() if one.dtype.is_floating_point][:1]
    if len(found) > 1:
        why = f"block {name!r} is given {len(found)} tensors that depend on the blocks before it"
        raise ValueError(cannot_split(model, why))
    if not found or found[0] not in own or not own[found[0]].dtype.is_floating_point:
        why = f"block {name!r} is given no float tensor that depends on the block before it"
        raise ValueError(cannot_split(model, why))
    return Crossing(found[0], own[found[0]])


CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class BlockList:
    """Blocks that a model runs in order, and where they are split.

    Attributes:
        name: Of the container, "" for the model itself.
        blocks: Names of its modules in order; if it is split behind the last, then of the module
            that is called next, too.
        boundaries: Increasing; ``b`` means in front of block ``b``.
    """

    name: str
    blocks: tuple[str, ...]
    boundaries: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.boundaries) + 1

    def is_in(self, name: str) -> bool:
        """Whether the list is, or is in, the module of this name: so it is in all stages."""
        return name in ("", self.name) or self.name.startswith(f"{name}.")

    def of_stage(self, stage: int) -> range:
        """The indices of a stage's blocks."""
        edges = (0, *self.boundaries, len(self.blocks))
        return range(edges[stage], edges[stage + 1])


def check_split_spec(module: nn.Module, split_spec: Mapping[str, SplitPoint]) -> None:
    """ValueError for names that the model does not have, and for points that are none."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    for name, point in split_spec.items():
        if not isinstance(point, SplitPoint):
            raise ValueError(
                f"split_spec[{name!r}] is {point!r}; give SplitPoint.BEGINNING or SplitPoint.END"
            )
        if name not in names:
            raise ValueError(
                f"split_spec names {name!r}, which is not a module of {type(module).__name__}; "
                f"{nearest(name, names)}"
            )


def find_block_list(
    module: nn.Module, split_spec: Mapping[str, SplitPoint], calls: Sequence[str]
) -> BlockList:
    """The list that all split points are in.

    Args:
        calls: Names of the modules that the model called, in order of the calls' beginnings.

    Raises:
        ValueError: if there is none; it says what can be split.
    """
    parents = {name.rpartition(".")[0] for name in split_spec}
    hint = _what_can_be_split(module, calls)
    for name in split_spec:
        parent = name.rpartition(".")[0]
        if not isinstance(module.get_submodule(parent), CONTAINERS):
            raise ValueError(
                f'cannot split {type(module).__name__} at {name!r} with method="modules": it is '
                f"not one of a list of blocks that are run in order. {hint}"
            )
    if len(parents) > 1:
        raise ValueError(
            f"cannot split {type(module).__name__} in several lists at once "
            f'({", ".join(sorted(parents))}) with method="modules". {hint}'
        )
    name = parents.pop()
    blocks = _members(name, module.get_submodule(name))
    if not _is_run_in_order(blocks, calls):
        wrong = next((b for b in blocks if list(calls).count(b) != 1), blocks[0])
        raise ValueError(
            f'cannot split {type(module).__name__} in {name!r} with method="modules": its blocks '
            f"are not run once each, in order ({wrong!r} was called "
            f"{list(calls).count(wrong)} times on the example). {hint}"
        )
    boundaries = {
        blocks.index(point) + (where is SplitPoint.END) for point, where in split_spec.items()
    }
    if len(blocks) in boundaries:
        blocks += (_called_behind(module, blocks[-1], calls),)
    return BlockList(name, blocks, tuple(sorted(boundaries)))


def _called_behind(module: nn.Module, last: str, calls: Sequence[str]) -> str:
    for name in calls[calls.index(last) + 1 :]:
        if not name.startswith(f"{last}.") and calls.count(name) == 1:
            return name
    raise ValueError(
        f"cannot split {type(module).__name__} behind {last!r}: no other module is called there. "
        + _what_can_be_split(module, calls)
    )


def _members(name: str, container: nn.Module) -> tuple[str, ...]:
    prefix = f"{name}." if name else ""
    return tuple(f"{prefix}{key}" for key, child in container._modules.items() if child is not None)


def _is_run_in_order(blocks: tuple[str, ...], calls: Sequence[str]) -> bool:
    members = set(blocks)
    return tuple(name for name in calls if name in members) == blocks


def _what_can_be_split(module: nn.Module, calls: Sequence[str]) -> str:
    found = []
    for name, container in module.named_modules():
        if isinstance(container, CONTAINERS):
            blocks = _members(name, container)
            if len(blocks) > 1 and _is_run_in_order(blocks, calls):
                found.append(f"{blocks[0]!r} to {blocks[-1]!r}")
    if not found:
        return (
            "It has no ModuleList, Sequential or ModuleDict whose modules run once each, in order."
        )
    return f"What can be split: {', '.join(found[:8])}."


def cannot_split(model: nn.Module, why: str) -> str:
    """The message of an error about a model whose blocks are not independent enough."""
    return (
        f'cannot split {type(model).__name__} with method="modules": {why}. What can be split: '
        "lists of blocks that hand on one float tensor, the hidden state, and take from the rest "
        "of the model only what it computes from keyword arguments"
    )
