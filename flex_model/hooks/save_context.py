"""``save_ctx`` across ranks: what editing functions wrote where they ran, sent to where it is read.

With ``edit_on="all"`` the ranks of a stage write the same, and nothing moves. What only rank 0
wrote, or only one stage of a pipeline, goes as ``save_ctx_on`` says.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.distributed import values
from flex_model.distributed.channel import Channel
from flex_model.distributed.serialization import PLAIN, decode, encode
from flex_model.distributed.tensor_dicts import Description, describe, exchange_json, from_rank
from flex_model.errors import HookError, agreed, see
from flex_model.hooks.step import current_microbatch

#: What a rank wrote: attributes as JSON can hold them, the tensors in them, and which of those are
#: on a GPU.
Told = tuple[dict[str, Any], list[Description], list[bool]]

_DELETED = {"deleted": True}  # in the place of a value


class _Same:
    """This very object, which stays alive: another one can't be where it was."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


def snapshot(context: Namespace) -> dict[str, Any]:
    """What ``written`` compares with: each attribute's state."""
    return {name: _state(value, with_values=True) for name, value in vars(context).items()}


def written(context: Namespace, before: dict[str, Any]) -> list[str]:
    """Attributes that were set or deleted since, or whose containers or tensors were changed in
    place.
    """
    now = vars(context)
    # Set to what they were before here, which is not what another rank may have.
    assigned = context._flex_assigned if isinstance(context, StageContext) else ()
    changed = [
        name
        for name, value in now.items()
        if name in assigned or name not in before or before[name] != _state(value, with_values=True)
    ]
    return changed + [name for name in before if name not in now]


def _state(value: Any, with_values: bool = False) -> Any:
    """What is another one after a change; of one that torch does not count only ``with_values``."""
    if isinstance(value, Tensor):
        is_hashed = with_values or value.is_inference()
        return "tensor", _Same(value), _version(value), _hash(value) if is_hashed else None
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return "array", _Same(value), value.tobytes()
    if isinstance(value, dict):
        items = [(key, _state(item, with_values)) for key, item in value.items()]
        return "dict", _Same(value), items
    if isinstance(value, (list, tuple, set)):
        return "items", _Same(value), [_state(item, with_values) for item in value]
    if isinstance(value, Namespace):
        return "namespace", _Same(value), _state(vars(value), with_values)
    return value if isinstance(value, PLAIN) else _Same(value)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _hash(tensor: Tensor) -> Any:
    """Of the values, which ``.data`` and numpy change too. Not of a GPU's, which would wait."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return None
    if tensor.is_meta or tensor.is_quantized or not tensor.untyped_storage().nbytes():
        return None
    if tensor.is_cuda and not tensor.is_inference():
        return None
    once = [slice(None) if stride else slice(1) for stride in tensor.stride()]
    return values.fingerprint(tensor.detach()[tuple(once)]).tolist()


def told(context: Namespace, names: Sequence[str]) -> tuple[Told, list[Tensor]]:
    """These attributes for other ranks, and their tensors, on the CPU."""
    found: list[Tensor] = []
    encoded: dict[str, Any] = {}
    for name in names:
        if name not in vars(context):
            encoded[name] = _DELETED
            continue
        try:
            encoded[name] = encode(vars(context)[name], found)
        except TypeError as error:
            encoded[name] = {"unknown": str(error)}
    is_on_gpu = [tensor.device.type != "cpu" for tensor in found]
    return (encoded, describe(found), is_on_gpu), [tensor.cpu() for tensor in found]


def check_sendable(rank: int, attributes: dict[str, Any], to: str) -> None:
    """ValueError, on every rank, for attributes that can't be sent."""
    for name, value in attributes.items():
        if isinstance(value, dict) and "unknown" in value:
            raise agreed(
                ValueError(
                    f"save_ctx.{name} is {value['unknown']} on rank {rank}, and can't be sent to "
                    f"{to}; keep tensors, numbers, text, and lists and dicts of them"
                )
            )


def take(
    context: Namespace, of_rank: Told, tensors: Sequence[Tensor], device: torch.device | None = None
) -> None:
    """Set what another rank wrote; with ``device`` there, what is on a GPU there."""
    attributes, _, is_on_gpu = of_rank
    if device is not None:
        tensors = [t.to(device) if on_gpu else t for t, on_gpu in zip(tensors, is_on_gpu)]
    for name, value in attributes.items():
        if value == _DELETED:
            vars(context).pop(name, None)
        else:
            setattr(context, name, decode(value, list(tensors)))


class SentToAll:
    """The ``save_ctx`` of functions that only rank 0 runs, sent to the others when a run, or the
    backward of one, ends.
    """

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self._channel, self._device = channel, device
        # By the id of a context, which stays alive with it.
        self._before: dict[int, tuple[Namespace, dict[str, Any]]] = {}

    def note(self, context: Namespace) -> None:
        """A function is about to be called with it. Local."""
        if id(context) not in self._before:
            self._before[id(context)] = context, snapshot(context)

    def send(self, context: Namespace) -> None:
        """What was written since to all ranks. Collective.

        Raises:
            ValueError: something that can't be sent; on every rank.
        """
        is_first = self._channel.mesh.place == 0
        before = self._before.pop(id(context), None)
        names = [] if before is None else written(context, before[1])
        mine, sent = told(context, names)
        of_first = exchange_json(self._channel, mine, "save_ctx at the end of a run")[0]
        check_sendable(self._channel.mesh.rank_at(0), of_first[0], "the others")
        received = from_rank(self._channel, 0, sent, of_first[1])
        if not is_first:
            take(context, of_first, received, self._device)

    def forget(self) -> None:
        """A run failed: what it wrote stays where it is. Local."""
        self._before.clear()


# Where a thing is in nested containers: keys, and for items of a list their identity.
_Place = tuple[Any, ...]


def _things_in(value: Any, place: _Place = ()) -> dict[_Place, Any]:
    """The states of what is in a container, but for what counts or names."""
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, dict):
        pairs = [(("key", key), item) for key, item in value.items()]
    elif isinstance(value, list):
        pairs = [(("item", id(item)), item) for item in value]
    else:
        return (
            {} if not place or isinstance(value, (int, str, type(None))) else {place: _state(value)}
        )
    return {at: one for key, item in pairs for at, one in _things_in(item, (*place, key)).items()}


def _look_inside(
    context: StageContext, name: str, before: dict[_Place, Any], call: tuple[int, int | None]
) -> None:
    """Note what a call put into the containers of an attribute, and what it read there, or took
    away, of another micro-batch.
    """
    inside, carried = context._flex_inside, context._flex_carried
    after = _things_in(vars(context).get(name))

    def other(at: _Place) -> bool:
        by = inside.get((name, at))
        return by is not None and by[0][0] != call[0] and by[0][1] != call[1]

    taken = [at for at in before if at not in after]
    own = [at for at in taken if (by := inside.get((name, at))) and by[0][1] == call[1]]
    for at, state in after.items():
        if before.get(at) != state:
            by = inside.get((name, at))
            is_exchanged = at[-1][0] == "item" and any(one[:-1] == at[:-1] for one in taken)
            is_second = is_exchanged or (by is not None and (by[1] or by[0][1] != call[1]))
            inside[name, at] = call, is_second
        elif other(at) and inside[name, at][1]:
            carried[name] = inside[name, at][0][1]
    for at in taken:
        if call[1] is not None and not own and other(at):
            carried[name] = inside[name, at][0][1]
    for at in taken:
        inside.pop((name, at), None)


class StageContext(Namespace):
    """The ``save_ctx`` of one rank of a pipeline. It knows what was written where, and refuses to
    be read where that is another value than the unsplit model's: one that was written on another
    rank, or by another hook for another micro-batch.
    """

    __slots__ = (
        "_flex_assigned",
        "_flex_call",
        "_flex_carried",
        "_flex_elsewhere",
        "_flex_found",
        "_flex_in_step",
        "_flex_inside",
        "_flex_is_split",
        "_flex_read",
        "_flex_set",
    )

    def __init__(self) -> None:
        super().__init__()
        self._flex_elsewhere: dict[str, int] = {}  # by attribute: the rank that has it
        self._flex_read: set[str] = set()
        self._flex_assigned: set[str] = set()  # in this step
        self._flex_in_step = self._flex_is_split = False
        # The hook and the micro-batch of the call that goes on, of those that set an attribute in
        # this step, and the micro-batches of others that the call read.
        self._flex_call: tuple[int, int | None] | None = None
        self._flex_set: dict[str, tuple[int, int | None]] = {}
        self._flex_carried: dict[str, int | None] = {}
        # What was in the containers that the call read, and of each thing in them the call that
        # put it there, and whether it took the place of another micro-batch's.
        self._flex_found: dict[str, dict[_Place, Any]] = {}
        self._flex_inside: dict[tuple[str, _Place], tuple[tuple[int, int | None], bool]] = {}

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith(("__", "_flex_")):
            self._flex_look(name)
        return super().__getattribute__(name)

    def __contains__(self, name: str) -> bool:
        self._flex_look(name)
        return super().__contains__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_flex_"):
            self._flex_elsewhere.pop(name, None)
            self._flex_carried.pop(name, None)  # read to be changed: a sum over micro-batches
            if self._flex_in_step:
                self._flex_assigned.add(name)
            if self._flex_call is not None:
                self._flex_set[name] = self._flex_call
        super().__setattr__(name, value)

    def _flex_look(self, name: str) -> None:
        if self._flex_in_step:
            self._flex_read.add(name)
            written, now = self._flex_set.get(name), self._flex_call
            if written and now and written[0] != now[0] and written[1] != now[1]:
                self._flex_carried[name] = written[1]
            if now and name not in self._flex_found:
                self._flex_found[name] = _things_in(vars(self).get(name))
        rank = self._flex_elsewhere.get(name)
        if rank is None:
            return
        text = (
            f"save_ctx.{name} was written on rank {rank} of the pipeline and sent to rank 0 only; "
            "make the model with FlexModel(schedule, save_ctx_on='all') to have it on every rank "
            f"({see('what-another-stage-wrote')})"
        )
        if self._flex_in_step or name in vars(self):  # an older value
            raise HookError(text)
        raise AttributeError(text)


# Functions, for a context's attributes are the user's.


def begin_step(context: Namespace, is_split: bool) -> None:
    """Note from now on what is read; ``is_split``: in several micro-batches."""
    assert isinstance(context, StageContext)
    context._flex_read.clear()
    context._flex_assigned.clear()
    context._flex_set.clear()
    context._flex_inside.clear()
    context._flex_in_step, context._flex_is_split = True, is_split


def end_step(context: Namespace) -> list[str]:
    """What was read since the step began."""
    assert isinstance(context, StageContext)
    context._flex_in_step, context._flex_call = False, None
    return sorted(context._flex_read)


def begin_call(context: Namespace, hook: int) -> None:
    """The function of a hook is called, for the micro-batch that is computed now."""
    if isinstance(context, StageContext) and context._flex_is_split:
        context._flex_call = hook, current_microbatch()
        context._flex_carried.clear()
        context._flex_found.clear()


def end_call(context: Namespace) -> None:
    """HookError if it read what another hook wrote for another micro-batch, and did not write it
    itself.
    """
    if not isinstance(context, StageContext) or context._flex_call is None:
        return
    call, context._flex_call = context._flex_call, None
    microbatch = call[1]
    for name, found in context._flex_found.items():
        _look_inside(context, name, found, call)
    for name, written in context._flex_carried.items():
        now = "the whole batch" if microbatch is None else f"micro-batch {microbatch}"
        raise HookError(
            f"save_ctx.{name} was written for micro-batch {written} and read for {now}: the "
            "micro-batches of a step share save_ctx; keep a value for each, as "
            f"save_ctx.{name}[current_microbatch()] in a dict made before the step, or use "
            f"batch_mode='full' ({see('what-another-stage-wrote')})"
        )


def note_elsewhere(context: Namespace, names: Iterable[str], rank: int) -> None:
    """That rank wrote them, and what it wrote is not here."""
    assert isinstance(context, StageContext)
    context._flex_elsewhere.update(dict.fromkeys(names, rank))
