"""A program's two models, unsharded and this rank's, and its inputs. Nothing here is flex_model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import custom
import torch
import torch.distributed as dist
from program import Argument, Batch, Place, Program, Value, Written, local_part
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from models import mesh, random

PARTS_PATH = Path(__file__).with_name("parts.py")
PARTS = compile(PARTS_PATH.read_text(), str(PARTS_PATH), "exec")
TOLERANCE = 1e-9


def place_of(program: Program) -> Place:
    rank = dist.get_rank() if program.ranks > 1 else 0
    return Place(program.tp, rank % program.tp, program.dp, rank // program.tp)


# ---- Models --------------------------------------------------------------------------------------


def namespace(program: Program, is_sharded: bool) -> dict[str, Any]:
    """What a program's text sees."""
    names: dict[str, Any] = {"__name__": "fuzzed", "custom": custom, "checkpoint": checkpoint}
    exec(PARTS, names)
    names |= {"states": program.layers == "states", "tiles": program.tp}
    if is_sharded and program.ranks > 1:
        place, on = place_of(program), mesh(program.dp, program.tp)
        names |= {"tp": place.tp, "tp_rank": place.tp_rank, "tp_group": on["tp"].get_group()}
        names |= {"dp": place.dp, "dp_rank": place.dp_rank, "dp_group": on["dp"].get_group()}
    return names


class Maker:
    """Makes models of one program, as often as needed."""

    def __init__(self, program: Program, written: Written):
        self.program, self.written = program, written
        code = compile(written.text, f"<program {program.mode} {program.seed}>", "exec")
        self.classes = []
        for is_sharded in (False, True):
            names = namespace(program, is_sharded)
            exec(code, names)
            self.classes.append(names["Model"])

    def make(self, is_sharded: bool) -> nn.Module:
        torch.default_generator.manual_seed(0)
        model = self.classes[is_sharded]()
        model.train(self.program.run == "train")
        return self.distribute(model) if is_sharded and self.program.ranks > 1 else model

    def distribute(self, model: nn.Module) -> nn.Module:
        program, on = self.program, mesh(self.program.dp, self.program.tp)
        if program.layers in ("plan", "dtensor"):
            plan = {name: style(kind) for name, kind in self.written.code.plan.items()}
            parallelize_module(model, on["tp"], plan)
        if program.data == "ddp" and any(p.requires_grad for p in model.parameters()):
            return DistributedDataParallel(
                model,
                process_group=on["dp"].get_group(),
                broadcast_buffers=False,
                find_unused_parameters=self.written.code.cuts_gradients,
            )
        if program.data == "fsdp2":
            for name, child in model.named_children():
                if program.seed % 2 and name[0] in "lq" and isinstance(child, nn.Linear):
                    fully_shard(child, mesh=on["dp"])
            fully_shard(model, mesh=on["dp"])
        return model


def style(kind: str) -> Any:
    name, _, dim = kind.partition(" to ")
    if name == "row":
        return RowwiseParallel(output_layouts=Shard(int(dim))) if dim else RowwiseParallel()
    return {
        "column": ColwiseParallel(),
        "column dtensor": ColwiseParallel(use_local_output=False),
        "sequence": SequenceParallel(use_local_output=True),
    }[name]


# ---- Inputs --------------------------------------------------------------------------------------


def full_input(argument: Argument, batch: Batch, seed: int, same_rows: bool) -> Tensor:
    shape = [batch.sizes.get(dim[0].size, dim[0].size) for dim in argument.dims]
    row_dims = [d for d, dim in enumerate(argument.dims) if dim[0].size == "B"]
    if argument.kind == "positions":
        return torch.arange(shape[0])
    if argument.kind == "zeros":
        return torch.zeros(shape, dtype=torch.float64)
    if argument.kind == "ones":
        return torch.ones(shape, dtype=torch.float64)
    drawn = list(shape)
    if same_rows and row_dims:
        drawn[row_dims[0]] = 1
    if argument.kind == "ids":
        generator = torch.Generator().manual_seed(seed)
        full = torch.randint(0, argument.high, drawn, generator=generator)
    else:
        full = random(*drawn, seed=seed)
    return full.expand(shape).clone()


@dataclass
class Data:
    """One batch: inputs in full and this rank's, and what the loss weighs outputs with."""

    batch: Batch
    full: list[Tensor]
    local: list[Tensor]


def data_of(program: Program, written: Written, place: Place) -> list[Data]:
    all_data = []
    for number, batch in enumerate(program.batches):
        arguments = written.code.arguments
        full = [
            full_input(argument, batch, 31 * number + index, program.same_rows)
            for index, argument in enumerate(arguments)
        ]
        local = [
            local_part(tensor, argument.dims, batch, place).clone()
            for tensor, argument in zip(full, arguments)
        ]
        all_data.append(Data(batch, full, local))
    return all_data


# ---- Runs ----------------------------------------------------------------------------------------


@dataclass
class Result:
    """What one forward, and backward, gave."""

    output: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)
    records: dict[str, list[Tensor]] = field(default_factory=dict)


@contextlib.contextmanager
def grad_mode(program: Program) -> Iterator[None]:
    if program.run == "no_grad":
        with torch.no_grad():
            yield
    elif program.run == "inference":
        with torch.inference_mode():
            yield
    else:
        yield


def run_oracle(program: Program, model: nn.Module, data: Data) -> Result:
    """The unsharded model on the whole batch."""
    model.zero_grad()
    set_mode(program, model, data)
    with grad_mode(program):
        output = model(*data.full)
    if program.has_gradients:
        targets = random(*output.shape, seed=99)
        ((output * targets).sum() / program.dp).backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return Result(output.detach().clone(), gradients)


def set_mode(program: Program, model: nn.Module, data: Data) -> None:
    model.train((data.batch.mode or program.run) == "train")


def run_sharded(
    program: Program, call: Any, data: Data, state: Any, place: Place, full_shape: Any
) -> Tensor:
    """This rank's forward and backward. ``call``: the model, or a FlexModel of it."""
    set_mode(program, call, data)
    with grad_mode(program):
        output = call(*data.local)
    if program.has_gradients:
        targets = local_part(random(*full_shape, seed=99), state.dims, data.batch, place)
        (output * targets).sum().backward()
    return output.detach().clone()


def clean(name: str) -> str:
    return name.removeprefix("module.")


def local_gradients(program: Program, model: nn.Module, values: dict[str, Value]) -> dict:
    """Of this rank, comparable to `expected_gradient`; collective."""
    found, over_dp, over_tp = {}, [], []
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is None:
            continue
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
        found[clean(name)] = grad
        if program.data == "plain":
            over_dp.append(grad)
        value = values.get(clean(name))
        if value is not None and value.is_partial:
            over_tp.append(grad)
    on = mesh(program.dp, program.tp) if program.ranks > 1 else None
    if over_tp and program.tp > 1:
        sum_together(over_tp, on["tp"].get_group())  # type: ignore[index]
    if over_dp:
        sum_together(over_dp, on["dp"].get_group())  # type: ignore[index]
        for grad in over_dp:
            grad /= program.dp
    return found


def sum_together(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))


def expected_gradient(
    program: Program, full: Tensor, value: Value | None, place: Place, is_dtensor: bool
) -> Tensor:
    """What `local_gradients` should give of a gradient of the oracle."""
    if value is None or (is_dtensor and program.layers in ("plan", "dtensor")):
        return full
    return local_part(full, value.dims, None, place)


def difference(name: str, ours: Any, expected: Tensor) -> str:
    """What differs, or the empty string."""
    if not isinstance(ours, Tensor):
        return f"{name}: {type(ours).__name__} instead of a tensor"
    if isinstance(ours, DTensor):
        ours = ours.to_local()
    if ours.shape != expected.shape:
        return f"{name}: shape {tuple(ours.shape)}, expected {tuple(expected.shape)}"
    if ours.dtype != expected.dtype:
        return f"{name}: {ours.dtype}, expected {expected.dtype}"
    if not ours.numel():
        return ""
    if not expected.is_floating_point():
        return "" if torch.equal(ours, expected) else f"{name}: integers differ"
    nan = expected.isnan()
    if not torch.equal(ours.isnan(), nan):
        return f"{name}: NaN in other places"
    same = (ours == expected) | nan
    apart = torch.where(same, 0.0, ours - expected).abs().max().item()
    finite = torch.where(expected.isfinite(), expected, 0.0).abs().max().item()
    if apart <= TOLERANCE * max(finite, 1e-3):
        return ""
    return f"{name}: off by {apart:.3g} of {finite:.3g}"


def gradient_differences(
    program: Program, written: Written, model: nn.Module, oracle: Result, place: Place
) -> list[str]:
    if not program.has_gradients:
        return []
    values = written.code.parameters
    ours = local_gradients(program, model, values)
    dtensors = {clean(name) for name, p in model.named_parameters() if isinstance(p, DTensor)}
    lines = []
    for name, full in oracle.gradients.items():
        expected = expected_gradient(program, full, values.get(name), place, name in dtensors)
        if name in ours:
            lines.append(difference(f"gradient of {name}", ours[name], expected))
        elif expected.any():
            lines.append(f"gradient of {name}: None")
    return [line for line in lines if line]


def invalid_text(
    program: Program,
    written: Written,
    maker: Maker,
    data: list[Data],
    results: list[Result],
    sites: list[dict[str, Tensor]],
    place: Place,
) -> str:
    """Why the program itself is not right on shards: a fault of the generator. Collective."""
    model, seen = maker.make(True), {}
    handles = []
    for name, module in model.named_modules():
        if clean(name) in written.code.sites:
            keep = functools.partial(_keep, seen, clean(name))
            handles.append(module.register_forward_hook(keep))
    for one, oracle, full_sites in zip(data, results, sites):
        model.zero_grad()
        output = run_sharded(program, model, one, written.state, place, oracle.output.shape)
        expected = local_part(oracle.output, written.state.dims, one.batch, place)
        lines = [difference("output", output, expected)]
        lines += gradient_differences(program, written, model, oracle, place)
        for name, value in written.code.sites.items():
            if name not in seen or value.is_partial or value.is_dtensor:
                continue
            part = local_part(full_sites[name], value.dims, one.batch, place)
            lines.append(difference(f"site {name}", seen[name], part))
        if any(lines):
            return "; ".join(line for line in lines if line)
    return ""


def _keep(seen: dict, name: str, module: nn.Module, args: Any, output: Any) -> None:
    if isinstance(output, Tensor):
        seen[name] = output.detach().clone()
