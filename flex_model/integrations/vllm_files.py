"""Reads what vLLM writes: hidden states of a request, and the experts that its tokens went to.

vLLM is not needed. The formats are those of vLLM's commit 015a95c8: the files of
``ExampleHiddenStatesConnector``, and ``routed_experts`` of ``--enable-return-routed-experts``.
"""

from __future__ import annotations

import base64
import fcntl
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def read_hidden_states(
    path: str | Path,
    layer_ids: Sequence[int],
    *,
    layer: str = "model.layers.{}",
    embedding: str = "model.embed_tokens",
) -> dict[str, Tensor]:
    """Return what vLLM stored of one request: ``token_ids``, (tokens,), and by the name of each
    layer its output, (tokens, width).

    Example::

        found = read_hidden_states(output.kv_transfer_params["hidden_states_path"], [4, 8])
        found["model.layers.3"]  # id 4: after four layers

    Args:
        layer_ids: ``eagle_aux_hidden_state_layer_ids`` of the run, which the file does not have, in
            ascending order, as vLLM runs and stores the layers. Id k is what layer k gets: the
            output of layer k - 1, without the model's last norm.
        layer: The name of a layer, with ``{}`` for its number.
        embedding: The name for id 0.

    Raises:
        ValueError: another kind of file or number of layers, or a file that vLLM still writes.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _check_written(Path(f"{path}.lock"))
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file ({error})") from error
    states, tokens = tensors.get("hidden_states"), tensors.get("token_ids")
    if states is None or tokens is None or states.dim() != 3 or len(states) != len(tokens):
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        raise ValueError(
            f"{path} is not a file of vLLM's ExampleHiddenStatesConnector: expected hidden_states "
            f"(tokens, layers, width) and token_ids (tokens,), got {shapes}"
        )
    if list(layer_ids) != sorted(set(layer_ids)) or len(layer_ids) != states.shape[1]:
        raise ValueError(
            f"{path} has {states.shape[1]} layers, got layer_ids {list(layer_ids)}; give the run's "
            "eagle_aux_hidden_state_layer_ids, ascending, as vLLM runs them"
        )
    names = [layer.format(number - 1) if number else embedding for number in layer_ids]
    found = {name: states[:, i].contiguous() for i, name in enumerate(names)}
    return {"token_ids": tokens, **found}


def _check_written(lock: Path) -> None:
    """ValueError while vLLM holds the lock of a file that it writes."""
    if not lock.exists():
        return
    with open(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{lock.with_suffix('')} is still being written by vLLM ({lock} is locked); read "
                "it when the request has finished"
            ) from None


def read_routed_experts(requests: Sequence[Any], blocks: Sequence[str]) -> dict[str, Tensor]:
    """Return the experts of all tokens of some requests, by the names of blocks of experts:
    (tokens, k), for ``flex.routing(name).replay``.

    Example::

        routes = read_routed_experts([output.outputs[0].routed_experts], blocks)
        for name in blocks:
            flex.register_forward_hook(flex.routing(name).replay(routes[name]))

    vLLM has one row for each token of prompt and completion but the last one, which it did not run.
    Replay takes them for a batch of the same tokens, without padding.

    Args:
        requests: ``routed_experts`` of each: an array, (tokens, layers, k), or the text of the HTTP
            response, base64 of a ``.npy`` file.
        blocks: The names of the model's blocks of experts, in the order of layers.

    Raises:
        ValueError: one is not of that kind, or has another number of layers.
    """
    routes = [_routes(one) for one in requests]
    shapes = {tuple(one.shape[1:]) for one in routes}
    if len(shapes) != 1 or any(one.dim() != 3 for one in routes) or not blocks:
        raise ValueError(
            f"routed_experts: expected (tokens, layers, k) with the same layers and k for each "
            f"request, and names of blocks; got {[tuple(one.shape) for one in routes]}"
        )
    joined = torch.cat(routes)
    if joined.shape[1] != len(blocks) or bool((joined < 0).any()):
        raise ValueError(
            f"routed_experts: {joined.shape[1]} layers from expert {int(joined.min())} on, for "
            f"{len(blocks)} blocks: {list(blocks)}; give a name for each layer of experts"
        )
    return {name: joined[:, i].contiguous() for i, name in enumerate(blocks)}


def _routes(value: Any) -> Tensor:
    import numpy

    try:
        if isinstance(value, str | bytes):
            value = numpy.load(io.BytesIO(base64.b64decode(value)), allow_pickle=False)
        return torch.from_numpy(numpy.asarray(value).astype("int64", casting="same_kind"))
    except (ValueError, TypeError, EOFError) as error:
        raise ValueError(
            f"routed_experts: expected an array of integers or base64 of a .npy file ({error}); a "
            "request of a server without --enable-return-routed-experts has none"
        ) from None
