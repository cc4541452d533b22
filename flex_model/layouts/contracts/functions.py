"""The contracts of ``autograd.Function``s.

Along tp the gradient of a split tensor is split alike, and that of a partial sum is replicated.
That of a replicated tensor is replicated, or a partial sum, and only the Function's own backward
decides which. Each line says it for the Functions of one name:

- ``"whole"``: the backward completes the gradient, as by an all-reduce or an all-gather.
- ``"partial"``: each rank has a summand.
- ``"local"``: the backward communicates nothing, so it is as for an operation of torch.
- ``"recomputes"``: the backward runs the forward's operations again, and their backward.

Along dp no contract is needed: the gradient of a tensor in rows is in the same rows, and that of a
shared one a sum over the ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from flex_model.distributed.placement import Placement
from flex_model.integrations.torch_private import function_of
from flex_model.layouts.contracts import opaque_calls
from flex_model.layouts.propagation import rules
from flex_model.layouts.statements import as_torch, placement_of

GRADIENTS = ("whole", "partial", "local", "recomputes")
Forward = Callable[..., Any]


def _by_flag(name: str) -> Callable[[Any], str]:
    """Return the contract of a Function that is passed, and keeps, whether it all-reduces."""
    return lambda node: "whole" if getattr(node, name) else "local"


def _from_local(node: Any) -> str:
    """A DTensor's gradient gets the forward's placement, or the one that the caller states."""
    stated = getattr(node, "grad_placements", None)
    return "partial" if stated is not None and any(p.is_partial() for p in stated) else "whole"


_TORCH = "torch.distributed."
_MAPPINGS = ("megatron.core.tensor_parallel.mappings.", "fairscale.nn.model_parallel.mappings.")
_LAYERS = "megatron.core.tensor_parallel.layers."
_HUGGING_FACE = (
    "transformers.distributed.parallel_utils.",
    "transformers.integrations.tensor_parallel.",
)
_BY_NAME: dict[str, str | Callable[[Any], str]] = {
    f"{_TORCH}tensor._api._FromTorchTensor": _from_local,
    "DTensor.from_local": _from_local,
    **{f"DTensor.{name}": "local" for name in ("to_local", "redistribute", "full_tensor")},
    f"{_TORCH}tensor._api._ToTorchTensor": "local",
    f"{_TORCH}tensor._redistribute.Redistribute": "local",
    f"{_TORCH}nn.functional._AllReduce": "whole",
    f"{_TORCH}nn.functional._Broadcast": "partial",  # the sum at its source, zeros elsewhere
    **{f"{module}_CopyToModelParallelRegion": "whole" for module in _MAPPINGS},
    **{f"{module}_ScatterToModelParallelRegion": "whole" for module in _MAPPINGS},
    **{f"{module}_ReduceFromModelParallelRegion": "local" for module in _MAPPINGS},
    **{f"{module}_GatherFromModelParallelRegion": "local" for module in _MAPPINGS},
    f"{_MAPPINGS[0]}_ScatterToSequenceParallelRegion": "whole",
    f"{_LAYERS}LinearWithGradAccumulationAndAsyncCommunication": _by_flag("allreduce_dgrad"),
    f"{_LAYERS}LinearWithFrozenWeight": _by_flag("allreduce_dgrad"),
    **{f"{module}_AllReduceBackward": "whole" for module in _HUGGING_FACE},
    **{f"{module}AllReduceBackward": "whole" for module in _HUGGING_FACE},
    **{f"{module}Split": "whole" for module in _HUGGING_FACE},
    "torch.utils.checkpoint.CheckpointFunction": "recomputes",
    "megatron.core.tensor_parallel.random.CheckpointFunction": "recomputes",
    "megatron.core.tensor_parallel.random.CheckpointWithoutOutputFunction": "recomputes",
    "fairscale.nn.model_parallel.random.CheckpointFunction": "recomputes",
    "fairscale.nn.checkpoint.checkpoint_activations.CheckpointFunction": "recomputes",
}
#: Modules all of whose other Functions communicate nothing in their backward.
_LOCAL = (
    "torch.nn.", "torch.distributed.fsdp.", "torch.distributed._composable.", "flex_model.",
    "megatron.core.fusions.", "megatron.core.transformer.moe.moe_utils.", "megatron.core.utils.",
    "megatron.core.tensor_parallel.cross_entropy.", "fairscale.nn.model_parallel.cross_entropy.",
    *_HUGGING_FACE, "transformers.models.", "transformers.integrations.finegrained_fp8.",
    "transformers.integrations.bitnet.", "transformers.integrations.eetq.",
)  # fmt: skip
_own: dict[str, tuple[Any, Forward | None, str | None]] = {}  # of the user, by name


def register_function(
    function: type[torch.autograd.Function],
    *,
    forward: Forward | str | None = None,
    gradient: str | None = None,
) -> None:
    """State the contract of an ``autograd.Function``.

    Example::

        class CopyToRanks(torch.autograd.Function):  # identity; the backward all-reduces
            ...

        register_function(CopyToRanks, gradient="whole")


        class SwapShards(torch.autograd.Function):  # all-to-all: parts of tokens <-> of heads
            ...

        swapped = {Shard(1): Shard(2), Shard(2): Shard(1), Shard(0): Shard(0)}
        register_function(SwapShards, forward=swapped.get)

    Args:
        forward: Receives the placement along one mesh axis of each tensor that ``apply`` is passed
            (of ``torch.distributed.tensor``; of ``flex_model.distributed.placement`` where torch
            has none such, as of interleaved parts; None where it is not known), and returns that
            of its result, or a list for several. It is called for each axis; along dp rows are
            ``Shard(0)``. Or a text as of `register_rule`, by the names that the class's ``forward``
            gives its arguments: of a kernel that communicates nothing, forward and backward. The
            operations inside are not followed then. Without it they are.
        gradient: How the ranks along tp hold the gradient of an input that is the same on all of
            them: ``"whole"`` (the backward completes it, as by an all-reduce), ``"partial"`` (each
            has a summand), or ``"local"`` (the backward communicates nothing). Those of split
            inputs and of partial sums need no statement.

    Raises:
        TypeError: ``function`` is not such a class, or ``forward`` is not callable.
        ValueError: another ``gradient``, also beside a text, or nothing is stated.
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise TypeError(
            "register_function: expected a subclass of torch.autograd.Function, got "
            f"{function!r}; example: register_function(CopyToRanks, gradient='whole')"
        )
    if isinstance(forward, str):
        if gradient != "local":
            raise ValueError(
                "register_function: a text describes a kernel that communicates nothing; pass "
                f"gradient='local' beside it, got {gradient!r}"
            )
        rules.register_rule(f"{opaque_calls.PREFIX}{name_of(function)}", forward, replace=True)
        forward = None
    if forward is not None and not callable(forward):
        raise TypeError(
            "register_function: forward must be a text or a function of placements, got "
            f"{type(forward).__name__}"
        )
    if gradient not in (None, *GRADIENTS[:3]) or (forward is None and gradient is None):
        raise ValueError(
            f"register_function: state forward=, or gradient= as one of {GRADIENTS[:3]}, got "
            f"{gradient!r}"
        )
    _own[name_of(function)] = function, forward, gradient


def name_of(function: Any) -> str:
    """Return the qualified name of a Function's class, with a number if the user has stated the
    contract of another class of that name, which a factory may have made.
    """
    name = qualified = f"{function.__module__}.{function.__qualname__}"
    numbers = itertools.count(2)
    while name in _own and _own[name][0] is not function:
        name = f"{qualified} ({next(numbers)})"
    return name


def with_forward() -> Iterator[Any]:
    """Yield the Functions whose forward has a contract of the user's."""
    return (function for function, forward, _ in _own.values() if forward is not None)


def infer_forward(
    name: str, placements: Sequence[Placement | None], num_outputs: int
) -> list[Placement | None]:
    """Return the placements of a Function's results, by the user's contract."""
    _, forward, _ = _own[name]
    assert forward is not None
    try:
        given = forward(*map(as_torch, placements))
    except Exception as error:
        raise TypeError(
            f"register_function({name}): forward= gets the placement of each tensor that apply is "
            f"passed, here {len(placements)}, and raised {type(error).__name__}: {error}"
        ) from error
    of_results = list(given) if isinstance(given, (list, tuple)) else [given] * num_outputs
    if len(of_results) != num_outputs:
        raise TypeError(
            f"register_function({name}): forward= must return one placement for all results, or a "
            f"list of {num_outputs}, got {given!r}"
        )
    return [placement_of(one, f"register_function({name}): forward") for one in of_results]


def gradient_of(node: Any) -> tuple[str, str | None]:
    """Return the name of a node of the graph, and its contract; None where none is stated."""
    function = function_of(node)
    if function is None:
        return node.name(), None
    return name_of(function), contract_of(name_of(function), node)


def contract_of(name: str, arguments: Any = None) -> str | None:
    """Return the contract of the Functions of a name; ``arguments``: an object with those that a
    Function was passed, as its node of the graph. Without them: None if they decide it.
    """
    if name in _own and _own[name][2] is not None:
        return _own[name][2]
    contract = _BY_NAME.get(name)
    if contract is None and (name.startswith(_LOCAL) or rules.passes_gradients(name)):
        contract = "local"
    if callable(contract):
        return None if arguments is None else contract(arguments)
    return contract
