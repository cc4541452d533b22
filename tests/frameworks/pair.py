"""What a row of the parity table is made of: a sharded model beside the unsharded one."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from oracle import apply

EXACT, ROUNDED = 1e-9, 2e-5  # float64; float32, or models that compute parts in float32


def call(model, inputs, keywords) -> torch.Tensor:
    return tensor_of(model(*inputs, **keywords))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@dataclass
class Pair:
    """An unsharded model, and how to make the sharded one from its weights.

    Attributes:
        oracle: To be run before `start`.
        start: Brings the framework's global state from the oracle's to the sharded model's.
        shard: Makes this rank's model, afresh each time; collective.
        inputs: Of the whole batch.
        batch_dims: Which dim of each input is the batch; None where all rows share it. Dim 0 where
            nothing is said, as in ``keywords``.
        output_batch_dim: Of the model's output.
        precise: The oracle in float32, with the same weights: what each number may differ by is
            then measured, not the tolerance's part of the largest value.
        first: Inputs of a run before the one that is compared, with the same hooks.
        sites: Where edits are made: module names by what they are.
        parameters: Whose gradients are edited.
        outputs, inputs_of: Further tensors of modules that are read: ``{name: indices}``.
        dp, dp_rank: Over how many ranks the rows of the batch are split, and which part is ours.
        columns: The part of a full output that this rank's output holds.
        sizes: What FlexModel must be told where the model does not say it.
        full_gradients: By the oracle's parameter names, of the sharded model; collective.
        turned: Sites whose dims the sharded model has in another order: ``{name: permutation}``.
        mixes_rows: Whether edits see the whole batch, so may mix its rows.
        backward: Whether there is one; else the model runs under ``inference_mode``.
        forward: ``(model, inputs, keywords) -> output``, where it is not a call of the model.
        run: ``(flex, inputs, keywords, targets) -> output``: forward and backward of the sharded
            model, where it is not `forward` and a sum.
        session: ``(register, records, targets) -> (output, gradients)``: runs the sharded model in
            a loop that wraps it by itself, and then calls ``register(flex)``.
        call_hook: What an oracle's hook records and returns, from its tensor and an edit.
        has_own_runs: Whether data-parallel ranks have runs of their own, ``dp_batch="local"``:
            ``call_hook`` records a list by data-parallel rank, None where one has no record.
        masked: A tensor of the whole batch without what pads it.
        state: States layouts to the FlexModel.
        without_gradients: Parts of the names of parameters whose gradients can't be read.
    """

    oracle: nn.Module
    shard: Callable[[], nn.Module]
    inputs: tuple[torch.Tensor, ...]
    sites: dict[str, str]
    parameters: tuple[str, ...]
    full_gradients: Callable[[nn.Module], dict[str, torch.Tensor]]
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    inputs_of: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dp: int = 1
    dp_rank: int = 0
    columns: Callable[[torch.Tensor], torch.Tensor] = lambda full: full
    sizes: dict[str, int] = field(default_factory=dict)
    keywords: dict[str, object] = field(default_factory=dict)
    tolerance: float = EXACT
    turned: dict[str, tuple[int, ...]] = field(default_factory=dict)
    start: Callable[[], None] = lambda: None
    mixes_rows: bool = True
    backward: bool = True
    forward: Callable[..., torch.Tensor] = call
    run: Callable[..., torch.Tensor] | None = None
    session: Callable[..., tuple[torch.Tensor, dict]] | None = None
    call_hook: Callable[[torch.Tensor, Callable | None], tuple] = apply
    has_own_runs: bool = False
    masked: Callable[[torch.Tensor], torch.Tensor] = lambda full: full
    state: Callable[[object], object] = lambda flex: None
    without_gradients: tuple[str, ...] = ()
    batch_dims: tuple[int | None, ...] = ()
    output_batch_dim: int = 0
    first: tuple[torch.Tensor, ...] = ()
    precise: nn.Module | None = None

    def has_no_gradient(self, name: str) -> bool:
        return any(part in name for part in self.without_gradients)

    def run_sharded(self, flex, targets: torch.Tensor) -> torch.Tensor:
        """Run forward and backward on this rank's part of the batch. Collective."""
        inputs, keywords = self.own_inputs(self.inputs), self.own_keywords()
        if self.run is not None:
            return self.run(flex, inputs, keywords, targets)
        if not self.backward:
            with torch.inference_mode():
                return self.forward(flex, inputs, keywords)
        output = self.forward(flex, inputs, keywords)
        (output * targets).sum().backward()
        return output

    def rows(self, full, dim: int | None = 0):
        """This rank's rows of a tensor; anything else as it is."""
        if self.dp == 1 or dim is None or not isinstance(full, torch.Tensor):
            return full
        return full.chunk(self.dp, dim)[self.dp_rank]

    def own_inputs(self, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        dims = self.batch_dims or (0,) * len(inputs)
        return [self.rows(value, dim) for value, dim in zip(inputs, dims, strict=True)]

    def own_keywords(self) -> dict[str, object]:
        return {name: self.rows(value) for name, value in self.keywords.items()}

    def own_output(self, full: torch.Tensor) -> torch.Tensor:
        return self.columns(self.rows(full, self.output_batch_dim))


@dataclass(frozen=True)
class Case:
    """One row of the table: ``build(tmp_path)`` is a context with a `Pair`; collective.

    Attributes:
        is_quick: Whether ``make test`` runs it, too; ``make parity`` runs all rows.
    """

    framework: str
    model: str
    ranks: int
    build: Callable[[Path], contextlib.AbstractContextManager[Pair]]
    is_quick: bool = False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Frameworks warn of much; flex_model's own warnings stay errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(?!flex_model)")
        yield


def tensor_of(output):
    """The tensor of a model's output that the loss is made of, as this rank holds it."""
    output = getattr(output, "logits", output)
    return output.to_local() if isinstance(output, DTensor) else output


def randomise(model: nn.Module, seed: int = 7) -> nn.Module:
    """Weights that show what is wrong: none is zero or one, no two layers are alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if parameter.ndim == 1 else 0.0
            std = 0.1 if parameter.ndim == 1 else 0.2
            parameter.normal_(mean, std, generator=generator)
    return model


def tokens(rows: int, length: int = 6, vocabulary: int = 48) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randint(1, vocabulary, (rows, length), generator=generator)


@contextlib.contextmanager
def own_groups() -> Iterator[Callable[[], None]]:
    """Process groups made inside are destroyed at the end, or by what this gives.

    Megatron makes twenty at a time, with their threads, and leaves most of them.
    """
    made, new_group = [], dist.new_group

    def keep(*args, **kwargs):
        made.append(new_group(*args, **kwargs))
        return made[-1]

    def end():
        for group in made:
            with contextlib.suppress(ValueError):  # not a member, or destroyed already
                dist.destroy_process_group(group)
        made.clear()

    try:
        with mock.patch.object(dist, "new_group", keep):
            yield end
    finally:
        end()


# ---- Gradients in full, without flex_model -------------------------------------------------------


def full_tensor(value: torch.Tensor) -> torch.Tensor:
    """A DTensor in full; a plain tensor is as it is. Collective over its mesh."""
    if not isinstance(value, DTensor):
        return value
    (placement, *others) = value.placements
    parts = getattr(placement, "split_factor", 1)
    if parts == 1 or others:
        return value.full_tensor()
    # torch refuses a lone _StridedShard: each rank's piece of each interleaved part
    group, dim = value.device_mesh.get_group(), placement.dim
    pieces = [piece.chunk(parts, dim) for piece in gathered(value.to_local(), group)]
    return torch.cat([piece[part] for part in range(parts) for piece in pieces], dim)


def gathered(part: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Every rank's tensor, of any shape. Collective."""
    parts = [None] * group.size()
    dist.all_gather_object(parts, part.detach(), group=group)
    return parts


def clean(name: str) -> str:
    for word in ("_fsdp_wrapped_module.", "_orig_mod."):
        name = name.replace(word, "")
    return name.removeprefix("module.")


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of DTensor parameters, and of plain ones that are whole."""
    return {
        clean(name): full_tensor(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
