"""Logit lens and tuned lens: the next-token logits read from a layer's hidden states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from flex_model.editing.edit import Edit, Scope, check_number, format_call, input_of
from flex_model.editing.region import Region
from flex_model.runs.step import current_step
from flex_model.selection.selectors import Selector

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flex_model.model import FlexModel

Norm = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


class LensArguments(TypedDict, total=False):
    """The keyword arguments of `logit_lens` and `tuned_lens`."""

    bias: str | None
    norm: str | None
    norm_bias: str | None
    kind: str | Norm
    eps: float
    positions: Selector
    keep: Callable[[Tensor], Tensor] | None


class Lens(Edit):
    """An edit that computes logits from hidden states and changes nothing. `logit_lens` and
    `tuned_lens` make one.

    It keeps the logits in ``save_ctx`` where edits run; in a pipeline they are on rank 0 after the
    step. ``take`` returns them.
    """

    def __init__(
        self,
        what: str,
        translator: str | None,
        unembed: str,
        *,
        bias: str | None = None,
        norm: str | None = None,
        norm_bias: str | None = None,
        kind: str | Norm = "rms",
        eps: float = 1e-6,
        positions: Selector = None,
        keep: Callable[[Tensor], Tensor] | None = None,
        name: str,
    ) -> None:
        if not callable(kind) and kind not in ("rms", "layer", "none"):
            raise ValueError(
                f"{what}: kind must be 'rms', 'layer', 'none' or a function, got {kind!r}"
            )
        weights = unembed, bias, norm, norm_bias
        for given in weights:
            if not isinstance(given, str) and (given is not None or unembed is None):
                raise TypeError(
                    f"{what}: weights are given by name, because a rank may hold only a shard; "
                    f"got {type(given).__name__}"
                )
        names = {"name": name} if what == "logit_lens" else {"name": name, "translator": translator}
        for argument, given in names.items():
            if not isinstance(given, str):
                raise TypeError(f"{what}: {argument} must be a str, got {type(given).__name__}")
        check_number(eps, f"{what}: eps")
        if keep is not None and not callable(keep):
            raise TypeError(f"{what}: keep must be a function or None, got {keep!r}")
        text = format_call(what, translator, unembed, norm=norm, positions=positions)
        needed = [given for given in weights if given is not None]
        super().__init__(text, self._read, needed)
        self._what, self._translator, self._kind, self._eps = what, translator, kind, eps
        self._weights, self._key, self._keep = weights, name + ":", keep
        self._region = Region(positions=positions)
        self._region.check_rectangular(what)

    def _read(self, full: Tensor, scope: Scope) -> None:
        if scope.site is None:
            raise RuntimeError(f"{self!r} must be registered with lens.at(module_name)")
        hidden = full[self._region.index(full, keeps_repeats=True)].detach()
        if self._translator is not None:
            module = scope.trainable(self._translator, self._what)
            hidden = hidden + module(input_of(module, hidden)).to(hidden.device)
        value: Any = scope.parameters.get
        unembed, bias, norm, norm_bias = map(value, self._weights)
        hidden = _normalized(hidden, self._kind, norm, norm_bias, self._eps)
        logits = F.linear(hidden, unembed, bias)
        microbatch = self._region.rows_of_microbatch(full)
        rows, in_all = ([], 0) if microbatch is None else microbatch
        entry = {
            "rows": rows,
            "in_all": in_all,
            "step": current_step(),
            "logits": logits if self._keep is None else self._keep(logits),
        }
        vars(scope.save_ctx).setdefault(self._key + scope.site, []).append(entry)

    def take(self, flex: FlexModel) -> dict[str, list[Tensor]]:
        """Return and remove the logits since the last ``take``, of all lenses of this name, also
        those of a failed run (take these before the next one): ``site -> [tensor, ...]`` in call
        order, each of the whole batch, ``(rows, positions, vocabulary)``. Local; call it on every
        rank. In a pipeline rank 0 gets all of them but those of a call that had a part of the batch
        when its step failed, the other ranks an empty dict.

        Example::

            lens = logit_lens("lm_head.weight", norm="model.norm.weight")
            for layer in range(32):
                flex.register_forward_hook(lens.at(f"model.layers.{layer}"))
            flex(tokens)
            logits = torch.stack([calls[0] for calls in lens.take(flex).values()])
        """
        context = vars(flex.save_ctx)
        names = [name for name in context if name.startswith(self._key)]
        read = {name.removeprefix(self._key): context.pop(name) for name in names}
        is_pipeline = "schedule" in vars(flex) or flex.pp_size > 1
        if is_pipeline and flex._communicator.mesh.group_rank > 0:
            return {}  # this rank has only the logits of its own stage
        return {site: _joined(entries) for site, entries in read.items()}


def _joined(entries: list[dict[str, Any]]) -> list[Tensor]:
    calls: list[Tensor] = []
    seen = Counter[tuple[int, ...]]()  # a module may be called more than once in a micro-batch
    of_calls: dict[tuple[int, int], tuple[list[int], list[Tensor]]] = {}
    for entry in entries:
        if not entry["rows"]:
            calls.append(entry["logits"])
            continue
        microbatch = entry["step"], *entry["rows"]
        seen[microbatch] += 1
        rows, parts = of_calls.setdefault((entry["step"], seen[microbatch]), ([], []))
        rows += entry["rows"]
        parts.append(entry["logits"])
        if len(rows) == entry["in_all"]:
            calls.append(torch.cat(parts)[torch.tensor(rows, device="cpu").argsort()])
    return calls


def logit_lens(
    unembed: str, *, name: str = "logit_lens", **settings: Unpack[LensArguments]
) -> Lens:
    """Make a lens that applies the final norm and the unembedding to a layer's output ``(rows,
    positions, units)`` (nostalgebraist 2020, "interpreting GPT: the logit lens").

    Example::

        lens = logit_lens("lm_head.weight", norm="model.norm.weight", eps=1e-6)
        lens = logit_lens("lm_head.weight", norm="transformer.ln_f.weight",
                          norm_bias="transformer.ln_f.bias", kind="layer", eps=1e-5)

    Register it with ``lens.at(layer)``, at any number of layers; ``Lens.take`` returns the logits.

    Args:
        unembed, bias: Names of the parameters ``(vocabulary, units)`` and ``(vocabulary,)``; they
            are gathered in full before each call (in a pipeline: before each step, from the stage
            that has them).
        norm, norm_bias: Names of the final norm's parameters; None (the default) if it has none.
        kind: The norm: "rms" (the default), "layer", "none", or a function of ``(hidden, weight,
            bias)``. "rms" multiplies by the weight; Gemma's norms multiply by 1 + weight: give a
            function. What a model does to its logits (soft-capping) is not done.
        eps: The epsilon of the final norm, from the model's config (default 1e-6).
        positions: The positions to read, the same in each row; None (the default): all.
        keep: A function of the logits ``(rows, positions, vocabulary)``, row by row, whose result
            is kept instead: ``lambda logits: logits.topk(5).indices``.
        name: Distinguishes lenses: ``take`` returns the logits of all that have this name.
    """
    return Lens("logit_lens", None, unembed, name=name, **settings)


def tuned_lens(
    translator: str, unembed: str, *, name: str = "tuned_lens", **settings: Unpack[LensArguments]
) -> Lens:
    """Make a logit lens of ``hidden + translator(hidden)`` (Belrose et al. 2023, "Eliciting latent
    predictions from transformers with the tuned lens").

    Example::

        flex.register_trainable_module("lens_3", nn.Linear(units, units))
        lens = tuned_lens("lens_3", "lm_head.weight", norm="model.norm.weight", name="lens_3")

    The logits that ``take`` returns are in the translator's graph (not in a pipeline, which sends
    them), so a loss of them trains the translator. Every rank has the same loss and the same
    gradient; don't sum gradients over ranks. The model gets no gradient. The translator computes on
    the device of its own parameters; the logits are on the layer's.

    Args:
        translator: The name of a registered trainable module.
        settings: The arguments of `logit_lens`, with their defaults.
    """
    return Lens("tuned_lens", translator, unembed, name=name, **settings)


def _normalized(hidden, kind, weight, bias, eps) -> Tensor:
    if callable(kind):
        return kind(hidden, weight, bias)
    if kind == "none":
        return hidden
    wide = hidden.float() if hidden.dtype in (torch.float16, torch.bfloat16) else hidden
    if kind == "layer":
        wide = F.layer_norm(wide, wide.shape[-1:], eps=eps)
    else:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normal = wide.to(hidden.dtype)
    normal = normal if weight is None else normal * weight
    return normal if bias is None else normal + bias
