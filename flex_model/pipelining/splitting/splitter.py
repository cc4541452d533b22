"""Split a model by keeping its module tree: stages that run the model's own code.

A stage is a second tree of the model's modules, over the same parameters, in which what belongs to
other stages is replaced by stand-ins. It runs the model's own forward: stand-ins of earlier blocks
are run through, the first own block is given what the stage has received, and the call of the block
after the last own one ends the forward. So masks, rotary embeddings and all else without parameters
are computed in every stage, by the model's own code.

A run of the model on the example shows how the hidden state is passed. Then every stage is run.
What it lacks is there without its values (`absent_tensor`), so a stage must hold what it can't run
without. That may not be another stage's block, nor an input that only the first stage gets, and all
stages together must equal the model.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.utils import _pytree
from torch.utils.weak import WeakTensorKeyDictionary

from flex_model import pytree
from flex_model.errors import Control
from flex_model.integrations.absent_tensor import AbsentError, Placeholder, names_in, without_values
from flex_model.pipelining.splitting.clones import clone_tree
from flex_model.pipelining.splitting.recording import (
    BlockList,
    Recording,
    cannot_split,
    find_difference,
    quietly,
    record,
    tensors_in,
)
from flex_model.pipelining.stand_ins import OwnTensor, PassThrough


def split_modules(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split_spec: Mapping[str, SplitPoint],
) -> list[nn.Module]:
    """Return the stages, verified. ValueError if no split at these points is right."""
    with quietly(model):
        recording = record(model, args, kwargs, split_spec)
        blocks = recording.blocks
        parts = find_parts(model, blocks, recording.calls)
        stages_hold: list[set[str]] = []
        given: tuple[Any, ...] = args
        for index in range(blocks.num_stages):
            held, output = _examine(model, recording, parts, index, given)
            stages_hold.append(held)
            given = (output,)
        order = [name for name, _ in model.named_modules()]
        # No stage needed these on the example.
        for name in parts.keys() - set().union(*stages_hold):
            holder = name if name in order else name.rpartition(".")[0]
            is_in_front = order.index(holder) < order.index(blocks.blocks[0])
            stages_hold[0 if is_in_front else -1].add(name)

        def stages() -> list[nn.Module]:
            return [
                build(model, recording, parts, index, held)
                for index, held in enumerate(stages_hold)
            ]

        examples = [recording]
        more_args, more_kwargs = _one_row_more(args, kwargs)
        with contextlib.suppress(Exception):  # a size that the model does not take
            examples.append(record(model, more_args, more_kwargs, split_spec))
        for example in examples:
            _compare(model, stages(), example)
    return stages()


def _examine(
    model: nn.Module, recording: Recording, parts: Parts, index: int, given: tuple[Any, ...]
) -> tuple[set[str], Any]:
    """What a stage must hold, and what it returns: its blocks, and all that it can't run without.
    ValueError if that is a value that it cannot have.
    """
    blocks = recording.blocks.blocks
    held = {blocks[number] for number in recording.blocks.of_stage(index)}
    while True:
        stage = build(model, recording, parts, index, held)
        try:
            return held, stage(*given, **recording.kwargs)
        except AbsentError as error:
            needed = error.names & parts.keys() - held - set(blocks)
            if not needed:
                _refuse(model, index, error)
            held |= needed
        except Exception as error:
            why = f"stage {index} does not run without the others: {error}"
            raise ValueError(cannot_split(model, why)) from error


def _refuse(model: nn.Module, index: int, error: AbsentError) -> NoReturn:
    """ValueError for a stage that needs inputs of the first, or other blocks."""
    label = min(error.names, key=lambda label: (label.startswith("input "), label))
    name = label.removeprefix("input ")
    if name != label:
        why = (
            f"stage {index} needs the model's input {name!r}, which only the first stage is given "
            "(a skip connection past the blocks, a mask made of it?); give it by keyword, so "
            f"that every stage has it: mb_kwargs={{{name!r}: ...}}"
        )
    elif error.is_read:
        why = f"stage {index}: {error}"
    else:
        why = (
            f"what stage {index} computes depends on blocks of other stages ({name!r}) other than "
            "by the hidden state"
        )
    raise ValueError(cannot_split(model, why)) from error


def _compare(model: nn.Module, stages: list[nn.Module], recording: Recording) -> None:
    try:
        output = run_stages(stages, recording.args, recording.kwargs)
    except RuntimeError as error:
        why = (
            f"its stages run with the sizes of the example only ({error}); give the inputs by "
            "keyword, so that every stage has them"
        )
        raise ValueError(cannot_split(model, why)) from error
    difference = find_difference(tensors_in(output), recording.answer)
    if difference is not None:
        raise ValueError(
            f"the stages of {type(model).__name__} do not compute what the model computes on the "
            f"example ({difference}). Does it return values of blocks beside the hidden state "
            "(output_hidden_states, output_attentions), draw random numbers other than by "
            "dropout, or keep state from call to call? In eval() it may not"
        )


def _one_row_more(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The example with its first row once more: sizes that were equal by chance differ there."""
    tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    rows = next((one.shape[0] for one in tensors if one.dim()), None)

    def longer(one: Tensor) -> Tensor:
        return torch.cat([one, one[:1]]) if one.dim() and one.shape[0] == rows else one

    return _pytree.tree_map_only(Tensor, longer, (args, kwargs))


def run_stages(stages: list[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """All stages in order, each with all keyword arguments."""
    output = stages[0](*args, **kwargs)
    for stage in stages[1:]:
        output = stage(output, **kwargs)
    return output


# ---- The stages' trees ---------------------------------------------------------------------------

Parts = dict[str, nn.Module | nn.Parameter]


def find_parts(model: nn.Module, blocks: BlockList, called: Iterable[str]) -> Parts:
    """What a stage holds or does not hold as a whole, by name: a block, another module that is
    called, or a parameter of a module that is not. What has no parameters is in every stage.
    """
    called, parts, seen = set(called), Parts(), set()

    def visit(name: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        is_whole = not blocks.is_in(name) and (name in called or not module._modules)
        if name in blocks.blocks or (is_whole and any(True for _ in module.parameters())):
            parts[name] = module
        elif not is_whole:
            prefix = f"{name}." if name else ""
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    parts[prefix + key] = parameter
            for key, child in module._modules.items():
                if child is not None:
                    visit(prefix + key, child)

    visit("", model)
    return parts


def build(
    model: nn.Module, recording: Recording, parts: Parts, index: int, held: set[str]
) -> nn.Module:
    """Make a stage that holds these parts, and stand-ins of the others."""
    blocks, crossings = recording.blocks, recording.crossings
    enters = crossings[index - 1] if index else None
    leaves = crossings[index] if index < len(crossings) else None
    received = None if enters is None else enters.hidden
    own = blocks.of_stage(index)
    ends = {} if leaves is None else {blocks.blocks[own.stop]: leaves.argument}
    others = {name: part for name, part in parts.items() if name not in held}
    exchange: dict[int, Any] = {
        id(part): StandIn(part, name, recording.outputs, received, name, ends.get(name))
        for name, part in others.items()
        if isinstance(part, nn.Module)
    }
    stage = clone_tree(model, exchange)
    for name, part in others.items():
        if isinstance(part, nn.Parameter):
            parent, _, key = name.rpartition(".")
            module = stage.get_submodule(parent)
            del module._parameters[key]
            absent = Placeholder(without_values(part), None, is_fixed=True).make(None, {name})
            vars(module)[key] = absent
    if enters is not None:
        stage.get_submodule(blocks.blocks[own.start]).register_forward_pre_hook(
            Entry(enters.argument), prepend=True, with_kwargs=True
        )
    stage.forward = StageForward(
        stage.forward, recording, received, is_first=index == 0, is_last=leaves is None
    )
    return stage


# The run of a stage that this is a part of; None outside, as in a recomputation.
_current: ContextVar[StageCall | None] = ContextVar("flex_model_stage_call", default=None)


class StageCall:
    """One run of a stage's forward: what belongs to its micro-batch.

    Attributes:
        hidden: What the stage has received; None for the first.
    """

    def __init__(self, hidden: Tensor | None) -> None:
        self.hidden = hidden

    def receive(self, stand_in: Tensor) -> Tensor:
        """What the stage has received, in place of ``stand_in``."""
        hidden = self.hidden
        assert hidden is not None
        if hidden.requires_grad and not torch.is_grad_enabled():
            raise RuntimeError(
                "the hidden state that a pipeline stage has received would lose its gradient: the "
                "model runs the block there without gradients. If it checkpoints blocks, pass "
                "use_reentrant=False"
            )
        if stand_in.shape != hidden.shape:
            raise RuntimeError(
                f"a pipeline stage has received a hidden state of sizes {tuple(hidden.shape)}, and "
                f"the model would run its first block on {tuple(stand_in.shape)}: its sizes do not "
                "follow from the example's; give pipeline() an example of these sizes"
            )
        return hidden


class StageEnd(Control):
    """Ends a stage's forward; it carries what the next stage is given."""

    def __init__(self, call: StageCall, hidden: Tensor) -> None:
        super().__init__("the end of a pipeline stage")
        self.call = call
        self.hidden = hidden


class StageForward:
    """The function that replaces the ``forward`` of a stage's module.

    Args:
        forward: The model's.
        recording: Nothing of it is kept that has values.
        received: The hidden state that the stage received on the example; None: none.
        is_first: It takes the model's inputs; the others take the hidden state first.
        is_last: It returns the model's output; the others the hidden state.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        recording: Recording,
        received: Tensor | None,
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        self._forward, self._signature = forward, recording.signature
        self._is_first, self._is_last = is_first, is_last
        self._num_positional, self._fixed = len(recording.args), recording.fixed
        self._absent = {
            name: Placeholder(value, received) for name, value in recording.positional().items()
        }
        self.__name__ = "forward"
        self.__signature__ = (
            self._signature if is_first else _later_signature(self._signature, self._absent)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._run(args, kwargs)
        needed = names_in(output)
        if needed:
            raise AbsentError(
                needed,
                f"a pipeline stage needs {', '.join(sorted(needed))}, which it does not have, when "
                f"the keyword arguments are {sorted(kwargs)}; give pipeline() an example with "
                "these, and by keyword what every stage needs",
            )
        return output

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = StageCall(None if self._is_first else self._hidden(args))
        token = _current.set(call)
        try:
            if call.hidden is not None:
                args, kwargs = self._complete(call.hidden, kwargs)
            elif len(args) > self._num_positional:
                raise TypeError(
                    f"a pipeline stage got {len(args)} positional arguments, and the example given "
                    f"to pipeline() had {self._num_positional}: later stages would lack what was "
                    "a keyword argument there; give it by keyword"
                )
            output = self._forward(*args, **{**kwargs, **self._fixed})
        except StageEnd as end:
            if end.call is not call:
                raise
            return end.hidden.contiguous()  # torch sends nothing else
        finally:
            _current.reset(token)
        if not self._is_last:
            raise RuntimeError(
                "the model came to its end without calling the block where this pipeline stage "
                "ends; it ran otherwise on the example given to pipeline()"
            )
        return as_tensors(output)

    def _hidden(self, args: tuple[Any, ...]) -> Tensor:
        if len(args) != 1 or not isinstance(args[0], Tensor):
            raise TypeError(
                "a later pipeline stage takes the hidden state, one tensor, and keyword "
                f"arguments of the model; got {len(args)} positional arguments"
            )
        hidden = args[0]
        if not hidden.requires_grad:
            return hidden
        return OwnTensor.apply(hidden) if torch.is_grad_enabled() else hidden.detach()

    def _complete(
        self, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's arguments, with placeholders for those that this stage does not get."""
        kwargs, filled = dict(kwargs), OrderedDict[str, Any]()
        for name, absent in self._absent.items():
            if name in kwargs:
                filled[name] = kwargs.pop(name)
            else:
                filled[name] = absent.make(hidden, {f"input {name}"})
        bound = inspect.BoundArguments(self._signature, filled)
        return bound.args, {**bound.kwargs, **kwargs}


def _later_signature(
    signature: inspect.Signature, absent: Mapping[str, Placeholder]
) -> inspect.Signature:
    hidden = inspect.Parameter("hidden_states", inspect.Parameter.POSITIONAL_ONLY)
    others = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            others.append(parameter)
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            default = None if name in absent else parameter.default
            others.append(parameter.replace(kind=parameter.KEYWORD_ONLY, default=default))
        if name == hidden.name:
            hidden = hidden.replace(name=f"received_{name}")
    return inspect.Signature([hidden, *others])


def as_tensors(output: Any) -> Any:
    """A model's output as pipelines pass it: its tensor, or its tensors in order."""
    leaves = pytree.flatten(output)[0]
    return leaves[0] if len(leaves) == 1 else tuple(leaves)


class StandIn(PassThrough):
    """A module of another stage, in a stage whose model code still calls it.

    It returns placeholders of what the module returned on the example. Attributes that model code
    reads are there: plain ones (``layer_idx``), modules in it as stand-ins too, sizes and dtypes of
    its parameters (``embed.weight.dtype``), and the module's own (``tower.dtype``,
    ``tower.device``).

    Args:
        original: The module; nothing of it is kept alive.
        name: Its name in the model.
        outputs: What modules returned on the example, by name, without values.
        received: The hidden state that the stage received on it; None: none.
        part: The name of what another stage has as a whole: this module, or one that it is in.
        ends: Which of its arguments is the hidden state, of the block after the stage's last one: a
            call of it ends the stage's forward.
    """

    def __init__(
        self,
        original: nn.Module,
        name: str,
        outputs: Mapping[str, Any],
        received: Tensor | None,
        part: str,
        ends: int | None = None,
    ) -> None:
        super().__init__()
        # None of it is registered: parameters and modules of a stage are not in __dict__.
        kept = {key: value for key, value in original.__dict__.items() if _is_plain(value)}
        for key, child in original._modules.items():
            inner = f"{name}.{key}"
            kept[key] = None if child is None else StandIn(child, inner, outputs, received, part)
        self.__dict__.update({**kept, **self.__dict__, "training": original.training})
        self.stands_for = f"{name}: {type(original).__name__}"
        self._name, self._part, self._ends = name, part, ends
        self._output = Placeholder(outputs[name], received) if name in outputs else None
        tensors = (*original._parameters.items(), *original._buffers.items())
        self._tensors = {
            key: Placeholder(without_values(tensor), received, is_fixed=True)
            for key, tensor in tensors
            if tensor is not None
        }
        first = next(original.parameters(), None)
        if first is not None and {"dtype", "device"} <= set(dir(type(original))):
            self._first = Placeholder(without_values(first), received)  # a Hugging Face model's

    def __getattr__(self, name: str) -> Any:
        call, own = _current.get(), self.__dict__
        hidden = None if call is None else call.hidden
        if name in ("dtype", "device") and "_first" in own:
            return getattr(self._first.make(hidden, ()), name)
        if name in own.get("_tensors", ()):
            return self._tensors[name].make(hidden, {self._part})
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = _current.get()
        if call is None:
            return super().forward(*args, **kwargs)
        if self._ends is not None:
            raise StageEnd(call, _pytree.tree_leaves((args, kwargs))[self._ends])
        if self._output is None:
            raise RuntimeError(
                f"a pipeline stage calls {self._name!r}, which another stage has, and the example "
                "given to pipeline() did not call it; give an example that does"
            )
        return self._output.make(call.hidden, {self._part} | names_in((args, kwargs)))

    def extra_repr(self) -> str:
        return f"for {self.stands_for}"


class Entry:
    """A forward-pre hook: the hidden state that a stage's first block is given is what the stage
    has received.

    Args:
        leaf: Which of the block's arguments is the hidden state.
    """

    def __init__(self, leaf: int) -> None:
        self._leaf = leaf
        self._received = WeakTensorKeyDictionary()  # by what it was given instead

    def __reduce__(self) -> tuple[Any, ...]:
        return Entry, (self._leaf,)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        call, stand_in = _current.get(), leaves[self._leaf]
        if call is not None:
            self._received[stand_in] = call.receive(stand_in)
        elif stand_in not in self._received:
            # A checkpointed block is computed again in the backward, on the very same tensor.
            raise RuntimeError(
                "the first block of a pipeline stage was run outside of its stage; if the model "
                "checkpoints several blocks at once, checkpoint each on its own"
            )
        leaves[self._leaf] = self._received[stand_in]
        return _pytree.tree_unflatten(leaves, spec)


def _is_plain(value: Any) -> bool:
    """Whether it can be kept without keeping modules or weights alive."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    return not isinstance(value, (nn.Module, Tensor)) and not callable(value)
