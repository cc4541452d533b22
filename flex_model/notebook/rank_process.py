"""A rank's side of a notebook: joins the ranks into one world, and runs the driver's requests."""

from __future__ import annotations

import os
import platform
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from IPython import get_ipython
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import flex_model
from flex_model import pytree
from flex_model.diagnostics import progress_bar
from flex_model.distributed.plain import kind_of as kind_of_memory
from flex_model.distributed.plain import plain
from flex_model.distributed.processes import identity
from flex_model.editing import Edit
from flex_model.hooks.function import HookFunction
from flex_model.hooks.registration import HookHandle
from flex_model.inspection import text
from flex_model.integrations.transformers_private import is_cache
from flex_model.model import FlexModel
from flex_model.notebook.wire import MemoryFile, Packer, Parcel, Reference, Unpacker, map_file
from flex_model.records.store import ActivationStore
from flex_model.runs.stop_request import STOP_REQUEST

#: Objects that keep state on both sides: the driver's one and its copies on the ranks are the same.
SHARED = (HookFunction, Edit)
_STAYS = (nn.Module, HookHandle, ActivationStore, torch.optim.Optimizer, *SHARED)


@dataclass(frozen=True)
class Request:
    """What the driver has a rank do.

    Attributes:
        number: Counts the requests of a driver.
        call: A function and its arguments.
        grad_mode: Whether gradients and inference mode are on at the driver.
        autocasts: The device types with autocast on there, and their dtypes.
    """

    number: int
    call: tuple[Callable[..., Any], tuple[Any, ...]]
    grad_mode: tuple[bool, bool]
    autocasts: list[tuple[str, torch.dtype]]


@dataclass(frozen=True)
class Kept:
    """A result that stays on the ranks, whatever it is."""

    value: Any


@dataclass(frozen=True)
class ByName:
    """A variable of the cells that stays on the ranks."""

    name: str


class RankProcess:
    """What a rank holds for the driver.

    Attributes:
        rank: The global rank.
        device: Where tensors from the driver go; None for the CPU.
        shares_memory: Whether the driver is on this host and can map this process's files.
    """

    def __init__(self, rank: int, device: torch.device | None, shares_memory: bool) -> None:
        self.rank, self.device, self.shares_memory = rank, device, shares_memory
        self._held: dict[Reference, Any] = {}
        self._file: MemoryFile | None = None

    def update(self, kinds: bytes, states: bytes, payload: Any) -> dict[Any, str]:
        """Make the driver's new hooks and edits, and set attributes of all as the driver has them;
        return errors, of attributes that a registered hook can't change.
        """
        unpacker = Unpacker(payload, self._resolve, self.device)
        for reference, kind in unpacker.unpickle(kinds).items():
            self._held.setdefault(reference, kind.__new__(kind))
        refused = {}
        for reference, state in unpacker.unpickle(states).items():
            for name, value in state.items():
                try:
                    self._held[reference].assign(name, value)
                except ValueError as error:
                    refused[reference, name] = str(error)
        return refused

    def _resolve(self, reference: Reference) -> Any:
        if reference[0] == "name":
            return look_up(reference[1])
        if reference not in self._held:
            raise LookupError(f"rank {self.rank} has not got what {reference} refers to")
        return self._held[reference]

    def answer(
        self, pickled: bytes, dropped: list[Reference], payload: Any
    ) -> tuple[Parcel | None, list[Reference]]:
        """Run one request; return its result, on rank 0, and which hooks are registered."""
        STOP_REQUEST.clear()
        if self._file is not None:
            self._file.close()
        for reference in dropped:
            self._held.pop(reference, None)
        request: Request = Unpacker(payload, self._resolve, self.device).unpickle(pickled)
        packed = self._pack(request, _run(request))
        hooks = [(one, held) for one, held in self._held.items() if isinstance(held, HookFunction)]
        return packed, [reference for reference, hook in hooks if hook._registrations]

    def _pack(self, request: Request, result: Any) -> Parcel | None:
        """Pack the result, on every rank in the same order, so that all keep the same objects."""
        known = {id(held): reference for reference, held in self._held.items()}
        num_kept = 0

        def keep(value: Any) -> Reference:
            nonlocal num_kept
            reference = ("kept", request.number, num_kept)
            num_kept += 1
            self._held[reference] = value
            return reference

        def refer(value: Any) -> Reference | None:
            if isinstance(value, ByName):
                found = look_up(value.name)
                return ("remote", ("name", value.name), kind_of(found), summary(found))
            value, stays = (value.value, True) if isinstance(value, Kept) else (value, False)
            if id(value) in known and known[id(value)][0] == "shared":
                return known[id(value)]
            if stays or isinstance(value, _STAYS) or is_cache(value):
                return ("remote", keep(value), kind_of(value), summary(value))
            return None

        packer = Packer(refer)
        try:
            pickled = packer.pickle(result)
        except Exception:  # what can't travel stays
            packer = Packer(refer)
            pickled = packer.pickle(Kept(result))
        if self.rank:
            return None
        payload = packer.payload(self.shares_memory)
        if isinstance(payload, MemoryFile):
            self._file = payload
            return pickled, payload.address
        return pickled, payload


def _run(request: Request) -> Any:
    function, args = request.call
    grad, inference = request.grad_mode
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind, dtype in request.autocasts:
            stack.enter_context(torch.autocast(kind, dtype))
        result = function(*args)
        leaves, spec = pytree.flatten(result)
        if all(type(leaf) in (Tensor, nn.Parameter) for leaf in leaves):
            return result
        return pytree.unflatten([_full(leaf) for leaf in leaves], spec)


def _full(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor, and other tensors as plain ones. Collective."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full if kind_of_memory(full) else plain(full)


# ---- What requests call --------------------------------------------------------------------------


def look_up(name: str) -> Any:
    """Return a variable of the cells; NameError if no cell has defined it."""
    variables = get_ipython().user_ns
    if name not in variables:
        raise NameError(f"no cell has defined {name!r} on the ranks")
    return variables[name]


def reveal(value: Any) -> Any:
    """Let a container of records stay here, where it is read item by item."""
    return Kept(value) if kind_of(value) == "mapping" or callable(value) else value


def read(name: str) -> Any:
    value = look_up(name)
    return ByName(name) if kind_of(value) == "mapping" or isinstance(value, _STAYS) else value


def read_attribute(value: Any, name: str) -> Any:
    return reveal(getattr(value, name))


def read_item(value: Any, key: Any) -> Any:
    return reveal(value[key])


def find_item(value: Any, key: Any) -> tuple[Any] | None:
    """Return the item of records in a tuple; None if there is none."""
    items = vars(value) if isinstance(value, Namespace) else value
    return (items[key],) if key in items else None


def rows_of(value: Any) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the keys of records, each with the shapes and dtypes of its tensors."""
    items = vars(value) if isinstance(value, Namespace) else value
    return [(key, _described(item)) for key, item in items.items()]


def _described(value: Any) -> list[tuple[str, str]]:
    leaves = pytree.flatten(value)[0]
    if not leaves:
        return [(summary(value), type(value).__name__)]
    return [(text.shape(tuple(x.shape)), str(x.dtype).removeprefix("torch.")) for x in leaves]


def assign(name: str, value: Any) -> None:
    get_ipython().user_ns[name] = value


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what is on the ranks with the driver's arguments, the same on every rank.

    Raises:
        ValueError: a data-parallel model, whose ranks each take their own rows.
    """
    used = [function, getattr(function, "__self__", None), *args, *kwargs.values()]
    num_ranks = max([x.dp_size for x in used if isinstance(x, FlexModel)], default=1)
    if num_ranks > 1 and any(leaf.dim() for leaf in pytree.flatten((args, kwargs))[0]):
        raise ValueError(
            f"the model is data parallel over {num_ranks} ranks, which take rows of their own, "
            "and the driver passes the same tensors to all; call it in a %%px cell, with each "
            "rank's rows"
        )
    result = function(*args, **kwargs)
    stays = callable(result) or isinstance(result, AbstractContextManager)
    return Kept(result) if stays else result


def wrap(model: Any, settings: dict[str, Any]) -> FlexModel:
    module = look_up(model) if isinstance(model, str) else model
    return FlexModel(module, **settings)


def kind_of(value: Any) -> str:
    """Return how the driver shows it: ``"flex"``, ``"mapping"`` or ``"other"``."""
    if isinstance(value, FlexModel):
        return "flex"
    return "mapping" if isinstance(value, Mapping | Namespace) else "other"


def summary(value: Any) -> str:
    if isinstance(value, FlexModel):
        return f"FlexModel of {type(value.module).__name__}"
    line = " ".join(repr(value).split())
    return line if len(line) <= 80 else f"{line[:77]}..."


# ---- The world -----------------------------------------------------------------------------------

_process: RankProcess | None = None


def handle(method: str, *arguments: Any) -> Any:
    """Call ``answer`` or ``update`` on this rank."""
    assert _process is not None, "the rank has not joined"
    return getattr(_process, method)(*arguments)


def introduce(host: str, address: tuple[int, int]) -> dict[str, Any]:
    """Return what the driver, on a host and with a memory file, needs of this process before ranks
    are numbered.
    """
    try:
        map_file(address).close()
        shares_memory = identity()[0] == host  # else it is another process's file
    except (OSError, ValueError):
        shares_memory = False
    return {
        "identity": identity(),
        "shares_memory": shares_memory,
        "num_gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def _hide_bars() -> None:
    """Have later imports find a tqdm that shows nothing: of all ranks' bars, rank 0's is shown."""
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported, which ipyparallel has done
    for name in [name for name in sys.modules if name.partition(".")[0] == "tqdm"]:
        del sys.modules[name]


def stop(number: int, frame: Any) -> None:
    """Handle the driver's signal at Ctrl-C: runs of FlexModels stop on all ranks together; other
    code is interrupted at the second signal.
    """
    if STOP_REQUEST.is_ignored:
        signal.raise_signal(signal.SIGINT)  # which IPython ignores between cells
    else:
        STOP_REQUEST.make()


def join(environment: dict[str, str], device: str | None, shares_memory: bool) -> None:
    """Make this process a rank, as torchrun would have started it."""
    global _process
    rank = int(environment["RANK"])
    os.environ.update(environment)
    if rank:
        _hide_bars()
    progress_bar.watch()
    signal.signal(signal.SIGUSR2, stop)
    get_ipython().events.register("pre_run_cell", lambda *_: STOP_REQUEST.clear())
    where = None
    if device == "cuda":
        where = torch.device("cuda", int(environment["LOCAL_RANK"]))
        torch.cuda.set_device(where)
    dist.init_process_group("gloo" if where is None else None, device_id=None)
    _process = RankProcess(rank, where, shares_memory)
    get_ipython().user_ns.update(torch=torch, dist=dist)


# ---- What a rank uses and is made of -------------------------------------------------------------


def memory() -> dict[str, int]:
    """Return this rank's memory in bytes."""
    found = {"process": psutil.Process().memory_info().rss}
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        found |= {
            "tensors on device": torch.cuda.memory_allocated(),
            "reserved on device": torch.cuda.memory_reserved(),
            "free on device": free,
            "device": total,
        }
    return found


def examine() -> dict[str, str]:
    """Return what should be the same on all ranks, and where this one is. Collective."""
    total = torch.ones((), device="cpu")
    if torch.cuda.is_initialized():
        total = total.cuda()
    dist.all_reduce(total)
    names = [torch.cuda.get_device_name()] if torch.cuda.is_initialized() else ["cpu"]
    return {
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "device": names[0],
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "flex_model": f"{flex_model.__version__} ({os.path.dirname(flex_model.__file__)})",
        "threads": str(torch.get_num_threads()),
        "ranks in a collective": str(int(total)),
    }


class MemoryReport(list[dict[str, int]], text.Printed):
    """By rank, its memory in bytes. Prints as a table."""

    def _blocks(self) -> Iterator[text.Table | str]:
        headers = ["rank", *self[0]]
        rows = [[str(rank), *map(text.size, row.values())] for rank, row in enumerate(self)]
        yield text.Table(headers, rows)


class RanksReport(list[dict[str, str]], text.Printed):
    """By rank, its process, device and versions. Prints as a table, with what differs.

    Attributes:
        findings: What is wrong, one line each.
    """

    @property
    def findings(self) -> list[str]:
        found = []
        for name in ("python", "torch", "flex_model"):
            values = list(dict.fromkeys(row[name] for row in self))
            if len(values) > 1:
                found.append(f"ranks have different {name}: {', '.join(values)}; install the same")
        if any(row["ranks in a collective"] != str(len(self)) for row in self):
            found.append(
                "a collective does not reach all ranks; ranks.restart() starts them afresh"
            )
        return found

    def _blocks(self) -> Iterator[text.Table | str]:
        headers = ["rank", *self[0]]
        yield text.Table(headers, [[str(i), *row.values()] for i, row in enumerate(self)])
        yield "\n".join(self.findings) or "all is well"
