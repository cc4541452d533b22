"""A run of a model on the example, and what it shows: which modules it calls, what they return, and
how the hidden state passes the boundaries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.utils import _pytree

from flex_model.integrations.keyword_arguments import takes_keyword
from flex_model.pipelining.splitting.absent_tensor import Absent, names_in, present
from flex_model.pipelining.splitting.block_list import BlockList, cannot_split, find_block_list
from flex_model.pipelining.splitting.clones import clone_tree
from flex_model.pipelining.splitting.observe import tensors_in
from flex_model.pipelining.splitting.placeholder import without_values


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
    twin = clone_tree(model, with_hooks=False)
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
