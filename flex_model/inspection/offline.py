"""What a model will look like on many ranks, from one process without weights."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flex_model.diagnostics.progress_bar import progress
from flex_model.distributed.layout import Replicate, Shape, Shard
from flex_model.distributed.mesh import Mesh, check_sizes, is_distributed
from flex_model.inspection.observed import Observed, observe, settle
from flex_model.inspection.shapes_only import shapes_only
from flex_model.inspection.tree import ModelTree, Node, is_called, named
from flex_model.layouts.follow import Follower, Proofs
from flex_model.layouts.sources import Weights
from flex_model.layouts.statements import Statements

Input = tuple[Shape, str]  # full sizes, name of the dtype
_TOKENS = 8


class CannotInspectError(RuntimeError):
    """The model can't be built or run without weights; the message tells why."""


@dataclass(frozen=True)
class _Source:
    """How to make the model on one rank, and its default inputs.

    Attributes:
        make: Called on every rank that is tried, inside a process group.
        shards_rows: Whether ``make`` itself is about all ranks, dp too.
    """

    make: Callable[[int], nn.Module]
    inputs: list[Input] | None
    is_for_all_ranks: bool


def inspect(
    model: str,
    tp: int,
    dp: int,
    inputs: list[Input] | None = None,
    *,
    show_progress: bool = False,
) -> ModelTree:
    """The modules of ``model`` and what they take and give on ``tp`` x ``dp`` ranks. Local.

    Example::

        inspect("checkpoints/llama", tp=4, dp=1).print()

    The model is built once for every rank, in a process group that has the others in name only, and
    runs on shapes. Weights that do not say how they are split are compared between the ranks.

    Args:
        model: A Hugging Face folder or ``config.json``; or ``package.module:function`` or
            ``file.py:function``, of a function without arguments that returns a module, which it
            may have sharded over the ranks of ``torch.distributed``.
        inputs: Full sizes and dtype of each positional input; dim 0 is the batch.
        show_progress: A bar on stderr that counts ranks.

    Raises:
        ValueError: sizes below 1, no such model or function, inputs that are missing or do not
            divide by ``dp``.
        CannotInspectError: the model can't be built or run on shapes.
    """
    check_sizes(tp, 1, dp)
    if is_distributed():
        raise ValueError("inspect makes process groups of its own; call it in a single process")
    source = _huggingface(model, dp) if _is_config(model) else _function(model)
    inputs = inputs or source.inputs
    if inputs is None:
        raise ValueError("a function does not say what its module takes; give --input, as 4,128")
    if any(not shape or shape[0] % dp for shape, _ in inputs):
        raise ValueError(
            f"dim 0 of every input is the batch, of which {dp} data-parallel ranks have rows; "
            f"give sizes that divide by {dp}"
        )
    return _tree(source, tp, dp, inputs, show_progress)


# ---- Models --------------------------------------------------------------------------------------


def _is_config(model: str) -> bool:
    return Path(model).is_dir() or Path(model).suffix == ".json"


def _huggingface(model: str, dp: int) -> _Source:
    transformers = importlib.import_module("transformers")
    path = Path(model)
    config_file = path / "config.json" if path.is_dir() else path
    if not config_file.is_file():
        raise ValueError(f"there is no {config_file}")
    config = transformers.AutoConfig.from_pretrained(config_file)

    def make(tp: int) -> nn.Module:
        with torch.device("meta"):
            made = transformers.AutoModelForCausalLM.from_config(config)
        made.eval()
        if tp == 1:
            return made
        if not hasattr(made, "maybe_distribute_model"):
            raise CannotInspectError(
                f"transformers {transformers.__version__} shards models only while it loads "
                "weights; inspect with --tp needs 5.23 or later, or a file.py:function that shards"
            )
        settings = importlib.import_module("transformers.distributed").DistributedConfig(tp_size=tp)
        settings, _, meshes = made.prepare_distribute_model(settings)
        return made.maybe_distribute_model(made, settings, meshes)

    return _Source(make, [((2 * dp, _TOKENS), "int64")], is_for_all_ranks=False)


def _function(model: str) -> _Source:
    place, _, name = model.rpartition(":")
    if not place:
        raise ValueError(
            f"{model!r} is no folder, no .json file and no module:function or file.py:function"
        )
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None or not Path(place).is_file():
            raise ValueError(f"there is no file {place}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{place} has no function {name!r}")

    def make(tp: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # so that weights differ where ranks hold different parts
            made = function()
        if not isinstance(made, nn.Module):
            raise ValueError(f"{model} returned a {type(made).__name__}, not a module")
        return made

    return _Source(make, None, is_for_all_ranks=True)


@contextlib.contextmanager
def _ranks_in_name(rank: int, world_size: int) -> Iterator[None]:
    """A world whose other ranks do not exist: its collectives return at once."""
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- What each rank sees -------------------------------------------------------------------------


def _tree(
    source: _Source, tp: int, dp: int, inputs: Sequence[Input], show_progress: bool
) -> ModelTree:
    ranks = tuple(range(dp * tp))
    tried = ranks if source.is_for_all_ranks else ranks[:tp]  # data-parallel ranks are all alike
    calls: list[list[Observed]] = []
    nodes: list[Node] = []
    modules: dict[str, nn.Module] = {}
    followers: list[Follower] = []
    for rank in progress(tried, "ranks", show_progress):
        mesh = Mesh(ranks, rank, 1, dp, tp)
        with _ranks_in_name(rank, len(tried)):
            try:
                module = source.make(tp)
                observed, follower = _observe(module, mesh, inputs)
                calls.append(observed)
                followers.append(follower)
            except (CannotInspectError, ValueError):
                raise
            except Exception as error:
                raise CannotInspectError(
                    f"the model can't be built or run without values ({type(error).__name__}: "
                    f"{str(error)[:600]}); run it for real, and ask flex.layouts()"
                ) from error
            if rank == 0:
                modules = named(module)
                nodes = [
                    Node(name, type(part).__name__, has_forward=is_called(part))
                    for name, part in modules.items()
                ]
    chunks = [follower.log.take() for follower in followers] * (len(ranks) // len(tried))
    concluded = []
    for place, observed in enumerate(calls * (len(ranks) // len(tried))):
        follower = followers[place % len(followers)]
        follower.proofs = Proofs(Mesh(ranks, place, 1, dp, tp))
        follower.proofs.follow(chunks)
        concluded.append([(name, kind, seen.concluded(follower)) for name, kind, seen in observed])
    by_name = {node.name: node for node in nodes}
    settle(by_name, zip(*concluded), Mesh(ranks, 0, 1, dp, tp))
    return ModelTree(nodes, f"{tp} tensor-parallel x {dp} data-parallel ranks")


def _observe(
    root: nn.Module, mesh: Mesh, inputs: Sequence[Input]
) -> tuple[list[Observed], Follower]:
    """Run one rank's model on shapes; the first tensor that every call takes and gives, and what
    that rank ran.
    """
    statements = Statements(root)
    follower = Follower(root, mesh, statements, Weights(root, mesh, statements))
    weight = next(root.parameters(), None)
    device = torch.device("cpu") if weight is None else weight.device
    given = [_input(shape, dtype, mesh, device) for shape, dtype in inputs]
    rows = Shard(0) if mesh.dp_size > 1 else Replicate()
    for i, tensor in enumerate(given):
        follower.note_input(tensor, str(i), (rows, Replicate()))
    with torch.no_grad(), shapes_only(root, mesh, follower, tuple(given)) as args:
        return observe(root, mesh, follower, lambda: root(*args)), follower


def _input(shape: Shape, dtype: str, mesh: Mesh, device: torch.device) -> Tensor:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype of torch")
    return torch.empty(shape[0] // mesh.dp_size, *shape[1:], dtype=kind, device=device)
