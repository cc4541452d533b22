"""Calls that are followed as one operation, with nothing inside.

While a forward is followed, these methods are replaced by ones that log the call: the conversions
of DTensors, which state their placements along the axes of their mesh and keep those along other
axes, ``apply`` of an ``autograd.Function`` whose forward has a contract of the user's, and kernels,
which are logged as operations (see `opaque_calls`).

A Function that recomputes its forward, such as a reentrant checkpoint's, is followed inside, where
torch records no graph: there operations and calls pass gradients as they will when it is
recomputed. A Function whose ``apply`` was taken before the forward (``copy = Copy.apply``) shows
only that its forward runs; what gradients it returns there is not known.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from flex_model.distributed.placement import Placement
from flex_model.integrations import dtensor
from flex_model.integrations.torch_private import DisableTorchFunction, fsdp2_fills
from flex_model.layouts import logged
from flex_model.layouts.active import active_recorders, all_paused
from flex_model.layouts.contracts import functions, opaque_calls
from flex_model.layouts.placement_encoding import decode
from flex_model.layouts.propagation import rules
from flex_model.layouts.propagation.operation import REPLICATED

if TYPE_CHECKING:
    from flex_model.layouts.proofs import AxisProofs
    from flex_model.layouts.recorder import Recorder

_OF_DTENSORS = ("from_local", "to_local", "redistribute", "full_tensor")
_DTENSOR = "DTensor."

_num_followers = 0
_replaced = ExitStack()


@contextmanager
def being_logged() -> Iterator[None]:
    """Log such calls inside."""
    global _num_followers
    if _num_followers == 0:
        _replace_all()
    _num_followers += 1
    try:
        yield
    finally:
        _num_followers -= 1
        if _num_followers == 0:
            _replaced.close()


def _replace_all() -> None:
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None:
        for name in _OF_DTENSORS:
            _replace(module.DTensor, name, _DTENSOR + name)
    for function in functions.with_forward():
        _replace(function, "apply", functions.name_of(function))
    for module, name, contract in opaque_calls.functions():
        _replace(module, name, contract)
    for owner, name in fsdp2_fills():  # whose memory is used again; weights are placed
        made: Any = all_paused()(getattr(owner, name))
        _replaced.enter_context(mock.patch.object(owner, name, made))
    encoder = torch.nn.TransformerEncoder
    _replaced.enter_context(mock.patch.object(encoder, "forward", _packing(encoder.forward)))
    made = classmethod(_followed(vars(torch.autograd.Function)["apply"]))
    _replaced.enter_context(mock.patch.object(torch.autograd.Function, "apply", made))


def _replace(owner: Any, name: str, text: str) -> None:
    before, function = vars(owner).get(name), getattr(owner, name)
    if text.startswith(opaque_calls.PREFIX):
        made: Any = _as_operation(function, function, text)
    else:
        is_method = before is not None and not isinstance(before, (staticmethod, classmethod))
        made = _logged(function, text) if is_method else staticmethod(_logged(function, text))
    _replaced.enter_context(mock.patch.object(owner, name, made))


def _recording() -> list[Recorder]:
    return [one for one in active_recorders() if not one.is_paused]


@contextmanager
def _during(recorders: Sequence[Recorder], **state: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for recorder in recorders:
            stack.enter_context(recorder.during(**state))
        yield


@contextmanager
def _recomputing(recorders: Sequence[Recorder], is_recomputed: bool) -> Iterator[None]:
    watched = _watched() if is_recomputed else nullcontext()
    with _during(recorders, is_recomputed=is_recomputed), watched:
        yield


def _followed(apply: Any) -> Callable[..., Any]:
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        run, recorders = apply.__get__(None, function), _recording()
        if not recorders:
            return run(*args, **kwargs)
        name = functions.name_of(function)
        kernel = next(filter(rules.has_rule, opaque_calls.names_of(function, name)), None)
        if kernel is not None:
            return _as_operation(run, function.forward, kernel)(*args, **kwargs)
        recomputes = functions.contract_of(name) == "recomputes"
        inside = [one for one in recorders if one.is_recomputed]
        inputs = [one for one in args if isinstance(one, Tensor)]
        values = [[recorder.value(one) for one in inputs] for recorder in recorders]
        with _recomputing(recorders, recomputes):
            result = run(*args, **kwargs)
        if recomputes:
            return result
        for recorder, of_inputs in zip(recorders, values):
            recorder.nodes.separate(of_inputs, result)
            if recorder in inside:
                passed = opaque_calls.arguments_of(function.forward, args, {})
                contract = functions.contract_of(name, SimpleNamespace(**passed))
                recorder.nodes.add_function(name, contract, of_inputs, result)
        return result

    return call


@contextmanager
def _watched() -> Iterator[None]:
    """Notice also Functions that run inside through an ``apply`` that was taken before."""
    with ExitStack() as stack:
        for function in _subclasses(torch.autograd.Function):
            forward, name = vars(function).get("forward"), functions.name_of(function)
            if isinstance(forward, staticmethod) and functions.contract_of(name) != "recomputes":
                made = staticmethod(_noticed(forward.__func__, name))
                stack.enter_context(mock.patch.object(function, "forward", made))
            if "apply" in vars(function) and name.startswith("transformers."):
                # Those leave the Function out where there is no graph; the recomputation has one.
                made = vars(torch.autograd.Function)["apply"]
                stack.enter_context(mock.patch.object(function, "apply", made))
        yield


def _subclasses(owner: Any) -> Iterator[Any]:
    for one in owner.__subclasses__():
        yield one
        yield from _subclasses(one)


def _noticed(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorders = [one for one in _recording() if one.is_recomputed]
        inputs = [one for one in args if isinstance(one, Tensor)]
        values = [[recorder.value(one) for one in inputs] for recorder in recorders]
        with _recomputing(recorders, False):
            result = forward(*args, **kwargs)
        for recorder, of_inputs in zip(recorders, values):
            recorder.nodes.add_function(name, "recomputes", of_inputs, result)
        return result

    return call


def _logged(function: Callable[..., Any], text: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorders = _recording()
        if not recorders:
            return function(*args, **kwargs)
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        values = [[recorder.value(tensor) for tensor in inputs] for recorder in recorders]
        with all_paused(), _during(recorders, meets=True):
            result = function(*args, **kwargs)
        outputs = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        first = inputs[0] if inputs and text.startswith(_DTENSOR) else None
        for recorder, of_inputs in zip(recorders, values):
            recorder.add_call(text, of_inputs, outputs, recorder.owner.stated(first))
            if recorder.is_recomputed:
                contract = functions.contract_of(text, SimpleNamespace(**kwargs))
                recorder.nodes.add_function(text, contract, of_inputs, result)
        return result

    return call


def _as_operation(run: Callable[..., Any], signature: Any, name: str) -> Callable[..., Any]:
    """Return ``run``, a kernel with the arguments of ``signature``, that is logged as one
    operation.
    """

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorders = _recording()
        named = opaque_calls.arguments_of(signature, args, kwargs)
        if not recorders or any(dtensor.is_dtensor(leaf) for leaf in tree_iter(named)):
            return run(*args, **kwargs)
        with DisableTorchFunction():
            encoded = [recorder.encode(None, (), named) for recorder in recorders]
        with all_paused():
            result = run(*args, **kwargs)
        with DisableTorchFunction():
            for recorder, before in zip(recorders, encoded):
                recorder.add_operation(name, before, result)
                recorder.record_results(result)
        return result

    return call


def _packing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return an encoder's forward, logged as one operation where it packs rows of several lengths
    into a nested tensor, and sets the padding to zero: it does not where its calls are followed.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with DisableTorchFunction():
            return forward(*args, **kwargs)

    whole = _as_operation(run, forward, f"{opaque_calls.PREFIX}torch.transformer_encoder")

    @functools.wraps(forward)
    def call(encoder: Any, *args: Any, **kwargs: Any) -> Any:
        named = opaque_calls.arguments_of(forward, (encoder, *args), kwargs)
        is_padded = named.get("src_key_padding_mask") is not None
        packs = is_padded and encoder.use_nested_tensor and not torch.is_grad_enabled()
        return (whole if packs and not encoder.training else forward)(encoder, *args, **kwargs)

    return call


def follow_call(proofs: AxisProofs, entries: tuple[logged.Call, ...]) -> None:
    """Note the placements of the results of such a call."""
    name, _, outputs, stated = entries[0]
    found_inputs = [proofs.value_of_ranks(one) for one in zip(*(entry.inputs for entry in entries))]
    inputs, placements = ([one[i] for one in found_inputs] for i in (0, 1))
    if name.startswith(_DTENSOR):
        found = [_of_dtensor(proofs.index, name, placements, stated, output) for output in outputs]
    else:
        found = functions.infer_forward(name, placements, len(outputs))
    for i, (output, placement) in enumerate(zip(outputs, found)):
        value = output.value
        proofs.shapes[value] = tuple(entry.outputs[i].local_shape for entry in entries)
        proofs.note_step(value, name, tuple(one for one in inputs if isinstance(one, int)))
        proofs.set_placement(value, placement)


def _of_dtensor(
    index: int, name: str, placements: Sequence[Placement | None], stated: Any, output: logged.Made
) -> Placement | None:
    """Return the placement of a conversion's result: the one that the DTensor states, the result or
    the input; along other axes than its mesh's the input's. None where it states one that is no
    layout, such as a maximum that is due.
    """
    is_plain = name in ("DTensor.to_local", "DTensor.full_tensor")
    stated = stated if is_plain else output.placements
    if stated is None:
        return None
    if stated[index] is None:
        return placements[0] if placements else None
    return REPLICATED if name == "DTensor.full_tensor" else decode(stated[index])
