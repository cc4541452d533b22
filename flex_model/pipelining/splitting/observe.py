"""Runs of a model that show what it does, and change nothing of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flex_model import pytree


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


@contextmanager
def unchanged(*modules: nn.Module) -> Iterator[None]:
    """No gradients; afterwards buffers and random states are what they were before."""
    buffers = [(buffer, buffer.clone()) for one in modules for buffer in one.buffers()]
    tensors = [tensor for one in modules for tensor in (*one.parameters(), *one.buffers())]
    devices = {tensor.device.index or 0 for tensor in tensors if tensor.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)), torch.no_grad():
        try:
            yield
        finally:
            for tensor, before in buffers:  # what has not changed is not written to
                is_known = not tensor.is_meta and tensor.shape == before.shape
                if is_known and not torch.equal(tensor, before):
                    tensor.copy_(before)
