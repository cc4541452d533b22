"""Inspects a model sharded over many ranks, and predicts what hooks cost there, from one process
and without weights.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import inspect
import itertools
import runpy
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flex_model.diagnostics.progress_bar import progress
from flex_model.distributed.mesh import Mesh, check_sizes, is_distributed
from flex_model.distributed.placement import Replicate, Shape, Shard
from flex_model.errors import nearest
from flex_model.hooks.function import KINDS, HookFunction
from flex_model.hooks.registration import Registration
from flex_model.inspection.call_costs import CallCosts, HookedTensor
from flex_model.inspection.dry_run import DryRun, DryRunRow, merged_rows, row_of, with_costs
from flex_model.inspection.shapes_only import Seen, run_watched, shapes_only
from flex_model.inspection.tree import ModelTree, Node, is_called, looks, named, set_tensors
from flex_model.integrations.checkpoints import model_on_meta
from flex_model.integrations.torch_private import forget_meshes
from flex_model.layouts.follow import Follower
from flex_model.layouts.mesh_proofs import MeshProofs
from flex_model.layouts.sources import Weights
from flex_model.layouts.statements import Statements

Input = tuple[Shape, str]  # full sizes, name of the dtype
_TOKENS = 8
# What a plan of tensor parallelism splits.
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


class CannotInspectError(RuntimeError):
    """The model can't be built or run without weights; the message has the reason."""


#: Makes the model on each simulated rank, inside a process group, given the tp size.
Make = Callable[[int], nn.Module]


@dataclass(frozen=True)
class OfflineRun:
    """One run of a model on shapes, as all its ranks would observe it.

    Attributes:
        mesh: The ranks, seen from the first one.
        nodes: The modules, by name.
        calls: The first input and output tensor of each call of a module, as all ranks see it.
    """

    mesh: Mesh
    nodes: dict[str, Node]
    calls: Sequence[Sequence[Seen]]

    def tree(self) -> ModelTree:
        """The modules with their tensors."""
        nodes = dict(self.nodes)
        set_tensors(nodes, self.calls, self.mesh)
        sizes = f"{self.mesh.tp_size} tensor-parallel x {self.mesh.dp_size} data-parallel ranks"
        return ModelTree(list(nodes.values()), sizes)


def run_on_shapes(
    model: str, tp: int, dp: int, inputs: list[Input] | None = None, *, show_progress: bool = False
) -> OfflineRun:
    """Run ``model`` on shapes, on ``tp`` x ``dp`` ranks. Local.

    Example::

        run_on_shapes("checkpoints/llama", tp=4, dp=1).tree().print()

    The model is built once for every rank, in a ``fake`` process group. Weights without placements
    of their own are compared between the ranks.

    Args:
        model: A Hugging Face folder or ``config.json``; or ``package.module:function`` or
            ``file.py:function``, naming a function without arguments that returns a module, which
            it may have sharded over the ranks of ``torch.distributed``.
        inputs: Full sizes and dtype of each positional input; dim 0 is the batch. One alone is a
            Hugging Face model's ``main_input_name``.
        show_progress: Whether to show a progress bar of ranks on stderr.

    Raises:
        ValueError: sizes below 1, no such model or function, missing inputs, or a batch that is
            not a multiple of ``dp``.
        CannotInspectError: the model can't be built or run on shapes.
    """
    check_sizes(tp, 1, dp)
    if is_distributed():
        raise ValueError("inspect makes its own process groups; call it in a single process")
    is_config = Path(model).is_dir() or Path(model).suffix == ".json"
    make = _huggingface(model) if is_config else _function(model)
    if not inputs and not is_config:
        raise ValueError("the inputs of a function's module are not known; give --input, as 4,128")
    if any(not shape or shape[0] % dp for shape, _ in inputs or ()):
        raise ValueError(
            f"dim 0 of every input is the batch, which is split over {dp} data-parallel ranks; "
            f"give multiples of {dp}"
        )
    # A function may shard over all ranks. Data-parallel ranks of a configuration's are equal.
    return _run(make, tp, dp, inputs or [], tp if is_config else dp * tp, show_progress)


# ---- Models --------------------------------------------------------------------------------------


def _huggingface(model: str) -> Make:
    transformers = importlib.import_module("transformers")
    path = Path(model)
    config_file = path / "config.json" if path.is_dir() else path
    if not config_file.is_file():
        raise ValueError(f"there is no {config_file}")

    def make(tp: int) -> nn.Module:
        if tp == 1:
            return model_on_meta(config_file, "AutoModelForCausalLM")
        if not hasattr(transformers.PreTrainedModel, "maybe_distribute_model"):
            raise CannotInspectError(
                f"transformers {transformers.__version__} shards models only while it loads "
                "weights; inspect with --tp needs 5.23 or later, or a file.py:function that shards"
            )
        untied = importlib.import_module("transformers.initialization").no_tie_weights
        with untied():  # tied weights are two in a plan
            made = model_on_meta(config_file, "AutoModelForCausalLM")
        settings = importlib.import_module("transformers.distributed").DistributedConfig(tp_size=tp)
        settings, _, meshes = made.prepare_distribute_model(settings)
        made = made.maybe_distribute_model(made, settings, meshes)
        made.tie_weights()
        return made

    return make


def _function(model: str) -> Make:
    place, _, name = model.rpartition(":")
    if not place:
        raise ValueError(
            f"{model!r} is not a folder, a .json file, or module:function or file.py:function"
        )
    if not place.endswith(".py"):
        defined = vars(importlib.import_module(place))
    elif Path(place).is_file():
        defined = runpy.run_path(place)
    else:
        raise ValueError(f"there is no file {place}")
    function = defined.get(name)
    if not callable(function):
        raise ValueError(f"{place} has no function {name!r}")

    def make(tp: int) -> nn.Module:
        with torch.random.fork_rng():
            # The same on every rank, so that weights differ only if ranks hold different shards.
            torch.manual_seed(0)
            made = function()
        if not isinstance(made, nn.Module):
            raise ValueError(f"{model} returned a {type(made).__name__}, not a module")
        return made

    return make


@contextlib.contextmanager
def _fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """Initialize a ``fake`` process group, whose collectives return at once without other ranks."""
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


# ---- The tensors of each rank --------------------------------------------------------------------


def _run(
    make: Make, tp: int, dp: int, inputs: Sequence[Input], num_simulated: int, show_progress: bool
) -> OfflineRun:
    ranks = tuple(range(dp * tp))
    calls: list[list[Seen]] = []
    nodes: dict[str, Node] = {}
    followers: list[Follower] = []
    for rank in progress(range(num_simulated), "ranks", show_progress):
        mesh = Mesh(ranks, rank, 1, dp, tp)
        module: nn.Module | None = None
        with _fake_ranks(rank, num_simulated):
            try:
                module = make(tp)
                observed, follower = _observe(module, mesh, inputs)
                calls.append(observed)
                followers.append(follower)
            except (CannotInspectError, ValueError):
                raise
            except Exception as error:
                raise CannotInspectError(
                    f"the model can't be built or run without values ({type(error).__name__}: "
                    f"{str(error)[:600]}){_not_divided(module, tp)}; give --input for each "
                    "tensor that it needs, or run it with values, and call flex.layouts()"
                ) from error
            if rank == 0:
                nodes = {
                    name: Node(name, type(part).__name__, has_forward=is_called(part))
                    for name, part in named(module).items()
                }
    num_equal = len(ranks) // num_simulated
    chunks = [follower.log.take() for follower in followers] * num_equal
    concluded = []
    for rank, (observed, follower) in enumerate(zip(calls, followers)):
        follower.infer_from(MeshProofs(Mesh(ranks, rank, 1, dp, tp)), chunks)
        concluded.append([seen.concluded(follower) for seen in observed])
    return OfflineRun(Mesh(ranks, 0, 1, dp, tp), nodes, list(zip(*concluded * num_equal)))


def _not_divided(module: nn.Module | None, tp: int) -> str:
    """Return which sizes of a configuration tensor-parallel ranks can't divide evenly, in words."""
    sizes = {name: getattr(getattr(module, "config", None), name, None) for name in _DIVIDED}
    uneven = [f"{name} {n}" for name, n in sizes.items() if isinstance(n, int) and n % tp]
    return f"; {tp} tensor-parallel ranks do not divide {', '.join(uneven)}" if uneven else ""


def _observe(root: nn.Module, mesh: Mesh, inputs: Sequence[Input]) -> tuple[list[Seen], Follower]:
    """Run one rank's model on shapes; return the tensors that every call observed, and the follower
    with the rank's operations.
    """
    statements = Statements(root)
    follower = Follower(root, mesh, statements, Weights(root, mesh, statements))
    weight = next(root.parameters(), None)
    device = torch.device("cpu") if weight is None else weight.device
    positional, named = _arguments(root, mesh, inputs)
    args = [_input(*one, mesh, device) for one in positional]
    kwargs = {name: _input(*one, mesh, device) for name, one in named.items()}
    rows = Shard(0) if mesh.dp_size > 1 else Replicate()
    for name, tensor in [*enumerate(args), *kwargs.items()]:
        follower.note_input(tensor, str(name), (rows, Replicate()))
    with torch.no_grad(), shapes_only(root, mesh, follower, (tuple(args), kwargs)) as given:
        return run_watched(root, follower, looks(root, mesh, follower), *given), follower


def _arguments(
    root: Any, mesh: Mesh, inputs: Sequence[Input]
) -> tuple[Sequence[Input], dict[str, Input]]:
    """Return what the model is called with, by position and by name: a Hugging Face model with its
    main input and, where it has a decoder of its own, with that one's tokens.
    """
    main = getattr(root, "main_input_name", None)
    if main is None or len(inputs) > 1:
        return inputs, {}
    if not inputs and main != "input_ids":
        raise ValueError(
            f"{type(root).__name__} reads {main}, whose shape is not known; give --input, as "
            "2,3,224,224 of images"
        )
    tokens = ((2 * mesh.dp_size, _TOKENS), "int64")
    named = {main: inputs[0] if inputs else tokens}
    if "decoder_input_ids" in inspect.signature(root.forward).parameters:
        named["decoder_input_ids"] = ((named[main][0][0], _TOKENS), "int64")
    return [], named


def _input(shape: Shape, dtype: str, mesh: Mesh, device: torch.device) -> Tensor:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype of torch")
    return torch.empty(shape[0] // mesh.dp_size, *shape[1:], dtype=kind, device=device)


_KINDS = KINDS[:-1]  # those on modules


@dataclass(frozen=True)
class HookLine:
    """One line of a file of hooks.

    Attributes:
        pattern: The name of a module, in which ``*`` is any text.
    """

    pattern: str
    edits: bool
    kind: str


def read(path: str) -> list[HookLine]:
    """Read a file of hooks: a hook a line, as in ``model.layers.*.mlp edit``, with a kind other
    than ``forward`` behind it; ``#`` begins a comment.

    Raises:
        ValueError: a line is none, or there is none.
    """
    lines = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        pattern, what, kind, *more = [*words, *["", "forward"][len(words) - 1 :], ""]
        if what not in ("read", "edit") or kind not in _KINDS or any(more):
            raise ValueError(
                f"{path}, line {number}: {line.strip()!r} is not a hook; give a module's name, "
                f"read or edit, and one of {', '.join(_KINDS)} (default: forward), as in "
                "'model.layers.*.mlp edit'"
            )
        lines.append(HookLine(pattern, what == "edit", kind))
    if not lines:
        raise ValueError(
            f"{path}: there are no hooks in it; write a line as 'model.layers.*.mlp edit'"
        )
    return lines


def predict(run: OfflineRun, lines: Sequence[HookLine], edit_on: str) -> DryRun:
    """Predict what the hooks cost, of a model in training. Local.

    Raises:
        ValueError: a line names no module that is called.
    """
    costs = CallCosts(run.mesh, edits_on_all=edit_on == "all")
    found: dict[Any, tuple[DryRunRow, HookedTensor | None]] = {}
    keys = []
    for line in lines:
        function = HookFunction(line.pattern, editing_function=_edit if line.edits else None)
        registration = Registration(function, line.kind, 0, 0, None, function, line.pattern)
        for ranks in _calls_of(run, registration):
            keys.append((line, *((one.shape, one.dtype, one.pair) for one in ranks)))
            if keys[-1] not in found:
                in_training = [
                    replace(one, needs_gradient=one.dtype.is_floating_point) for one in ranks
                ]
                found[keys[-1]] = row_of(costs, registration, in_training)
    rows, forward, backward = with_costs(costs, [[found[key]] for key in keys], has_key=True)
    merged = merged_rows((key[0], row) for key, (row,) in zip(keys, rows))
    return DryRun(itertools.chain(*merged.values()), forward, backward)


def _calls_of(run: OfflineRun, hook: Registration) -> list[Sequence[Seen]]:
    """The calls that a hook sees, whose module's name is a pattern.

    Raises:
        ValueError: there are none.
    """
    kind = "input" if hook.takes_inputs else "output"
    sites = {ranks[0].hook for ranks in run.calls if ranks[0].hook[1] == kind}
    matching = {site for site in sites if fnmatch.fnmatchcase(site[0], hook.name)}
    if not matching:
        called = sorted(name for name, _ in sites if name)
        raise ValueError(
            f"no module that the model calls with tensors is named {hook.name!r}; "
            f"{nearest(hook.name, called, 'module')}; correct the name (inspect without --hooks "
            "shows all)"
        )
    return [ranks for ranks in run.calls if ranks[0].hook in matching]


def _edit(module: nn.Module, full: Tensor, save_ctx: Namespace, modules: nn.ModuleDict) -> Tensor:
    """Stands for the user's function, typed as users do, and is never called."""
    return full
