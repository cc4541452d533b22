"""Split a model by keeping its module tree: stages that run the model's own code.

A stage is a second tree of the model's modules, over the same parameters, in which what belongs to
other stages is replaced by stand-ins (`pass_through`). It runs the model's own forward: stand-ins
of earlier blocks are run through, the first own block is given what the stage has received, and
the call of the block after the last own one ends the forward. So masks, rotary embeddings and all
else without parameters are computed in every stage, by the model's own code.

What is whose, how the hidden state is passed and which sizes values have is learnt from runs of
the model on the example. Then every stage is run and examined: its output must not depend on any
value that stood in for another, and all stages together must equal the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.utils import _pytree

from flex_model import pytree
from flex_model.pipelining.block_list import BlockList, find_block_list
from flex_model.pipelining.clones import clone_tree
from flex_model.pipelining.observe import (
    Arguments,
    Dependence,
    ParameterUses,
    Recording,
    bind,
    other_examples,
    quietly,
)
from flex_model.pipelining.pass_through import (
    Entry,
    Exit,
    LeaveAtExit,
    PassThrough,
    ReceiveAtEntry,
    StandIn,
)
from flex_model.pipelining.stage_forward import StageCall, StageForward, as_tensors
from flex_model.pipelining.templates import NoRule, Observed, TreeTemplate


@dataclass(frozen=True)
class Crossing:
    """How the hidden state passes one boundary.

    Attributes:
        argument: Index of the leaf in the arguments of the block behind the boundary; None at the
            end of the list.
        output: Index of the leaf in the output of the block in front of it, where the block behind
            is given that very tensor; else None.
        shapes: Its sizes in each run.
        dtype: Its dtype.
    """

    argument: int | None
    output: int | None
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype


@dataclass
class Learnt:
    """What the runs on the example showed."""

    signature: inspect.Signature
    fixed: dict[str, Any]
    examples: list[Arguments]
    recordings: list[Recording]
    inputs: list[dict[str, Any]]  # per example: what only the first stage gets
    answers: list[list[Tensor]]
    blocks: BlockList
    crossings: list[Crossing] = field(default_factory=list)


def split_modules(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split_spec: Mapping[str, SplitPoint],
) -> list[nn.Module]:
    """The stages, verified. ValueError if there is no right split at these points."""
    with quietly(model):
        learnt = _learn(model, args, kwargs, split_spec)
        held = _examine(model, learnt)
        _compare(
            [
                _build(model, learnt, index, held[index], with_hooks=False)
                for index in range(learnt.blocks.num_stages)
            ],
            learnt,
            type(model).__name__,
        )
    return [
        _build(model, learnt, index, held[index], with_hooks=True)
        for index in range(learnt.blocks.num_stages)
    ]


# ---- What the model does ---------------------------------------------------------------------


def _learn(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split_spec: Mapping[str, SplitPoint],
) -> Learnt:
    twin = clone_tree(model, with_hooks=False)
    signature, positional = bind(twin, args)
    fixed = {"use_cache": False} if "use_cache" in signature.parameters else {}
    kwargs = {**kwargs, **fixed}
    recording = Recording(twin)
    with recording.on(), ParameterUses(recording):
        twin(*args, **kwargs)
    blocks = find_block_list(model, split_spec, recording.calls)
    examples: list[Arguments] = []
    recordings, answers = [], []
    for index, (some_args, some_kwargs) in enumerate(
        [(args, kwargs), *other_examples(args, kwargs)]
    ):
        again = Recording(twin, keep=blocks.blocks)
        try:
            with again.on():
                output = twin(*some_args, **some_kwargs)
        except Exception:
            if index == 0:
                raise
            continue  # a size that the model does not take
        if again.calls != recording.calls:
            continue  # another path: nothing can be learnt from it
        examples.append((some_args, some_kwargs))
        recordings.append(again)
        answers.append(pytree.flatten(output)[0])
    if not answers[0]:
        raise ValueError(
            f"{type(model).__name__} returns no tensor on the example; a pipeline's last stage "
            "must return some"
        )
    recordings[0].parameter_uses = recording.parameter_uses
    recordings[0].outer_uses = recording.outer_uses
    inputs = [_first_stage_inputs(model, signature, *example) for example in examples]
    learnt = Learnt(signature, fixed, examples, recordings, inputs, answers, blocks)
    learnt.crossings = _find_crossings(model, learnt)
    return learnt


def _first_stage_inputs(
    model: nn.Module, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Positional arguments; without any, the keyword argument that is the model's main input."""
    if args:
        return dict(signature.bind_partial(*args).arguments)
    main = getattr(model, "main_input_name", None)
    if main not in kwargs:
        main = next((name for name, value in kwargs.items() if isinstance(value, Tensor)), None)
    return {} if main is None else {main: kwargs[main]}


def _find_crossings(model: nn.Module, learnt: Learnt) -> list[Crossing]:
    blocks = learnt.blocks
    arguments = _dependent_arguments(model, learnt)
    crossings = []
    for boundary in blocks.boundaries:
        behind = blocks.blocks[boundary] if boundary < len(blocks.blocks) else None
        before = blocks.blocks[boundary - 1] if boundary else None
        argument = output = None
        if behind is not None:
            argument = _only_hidden(model, learnt, boundary, arguments)
            leaves = [recording.kept[behind][0][argument] for recording in learnt.recordings]
            if before is not None:
                returned = learnt.recordings[0].kept[before][1]
                output = next((i for i, leaf in enumerate(returned) if leaf is leaves[0]), None)
        else:
            assert before is not None
            returned = learnt.recordings[0].kept[before][1]
            output = next((i for i, leaf in enumerate(returned) if _is_hidden(leaf)), None)
            if output is None:
                raise ValueError(_message(model, f"block {before!r} returns no float tensor"))
            leaves = [recording.kept[before][1][output] for recording in learnt.recordings]
        if not _is_hidden(leaves[0]):
            raise ValueError(_message(model, f"block {behind!r} is given no float tensor"))
        shapes = tuple(tuple(leaf.shape) for leaf in leaves)
        crossings.append(Crossing(argument, output, shapes, leaves[0].dtype))
    return crossings


def _is_hidden(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype.is_floating_point


def _only_hidden(
    model: nn.Module, learnt: Learnt, boundary: int, arguments: dict[int, dict[int, str]]
) -> int:
    name = learnt.blocks.blocks[boundary]
    found = arguments.get(boundary, {})
    if boundary == 0:  # nothing comes before it: as the next block
        found = arguments.get(1, {})
        if not found:
            leaves = learnt.recordings[0].kept[name][0]
            found = {i: "" for i, leaf in enumerate(leaves) if _is_hidden(leaf)}
            found = dict(list(found.items())[:1])
    if len(found) != 1:
        what = (
            f"is given {len(found)} tensors that depend on the blocks before it "
            f"({', '.join(found.values())})"
            if found
            else "is given no tensor that depends on the block before it"
        )
        raise ValueError(_message(model, f"block {name!r} {what}"))
    return next(iter(found))


def _message(model: nn.Module, why: str) -> str:
    return (
        f'cannot split {type(model).__name__} with method="modules": {why}. What can be split: '
        "lists of blocks that hand on one float tensor, the hidden state, and take from the rest "
        "of the model only what it computes from keyword arguments"
    )


def _dependent_arguments(model: nn.Module, learnt: Learnt) -> dict[int, dict[int, str]]:
    """Which arguments of each block depend on what blocks before it returned: by block, leaf index
    and name.
    """
    blocks = learnt.blocks.blocks
    recording = learnt.recordings[0]
    exchange, stand_ins = {}, []
    for name in blocks:
        outputs = [_template(recording.outputs[name][:1], [()], torch.float32)]
        block = model.get_submodule(name)
        stand_ins.append(StandIn(block, name, outputs))
        exchange[id(block)] = stand_ins[-1]
    twin = clone_tree(model, exchange, with_hooks=False)
    dependence = Dependence()
    found: dict[int, dict[int, str]] = {}

    def look(index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            leaves, _ = _pytree.tree_flatten_with_path((args, kwargs))
            found[index] = {
                number: _argument_name(path)
                for number, (path, leaf) in enumerate(leaves)
                if isinstance(leaf, Tensor) and dependence.labels_of(leaf)
            }
            if index == len(blocks) - 1:
                raise _Enough

        return hook

    for index, stand_in in enumerate(stand_ins):
        stand_in.register_forward_pre_hook(look(index), with_kwargs=True)
    args, kwargs = learnt.examples[0]
    try:
        with dependence, StageCall(None, dependence):
            twin(*args, **kwargs)
    except _Enough:
        pass
    except Exception as error:
        raise ValueError(
            _message(model, f"what it does between blocks depends on their values ({error})")
        ) from error
    return found


class _Enough(BaseException):
    pass


def _argument_name(path: Any) -> str:
    side, *rest = path
    if getattr(side, "idx", 0) == 0:
        return "positional argument " + _pytree.keystr(tuple(rest)).strip("[]")
    return _pytree.keystr(tuple(rest)).strip("[]")


def _template(observed: list[Observed], hiddens: Any, dtype: torch.dtype) -> TreeTemplate:
    return TreeTemplate.learn(observed, hiddens, dtype)


# ---- Whose is what ---------------------------------------------------------------------------


class _Ownership:
    """Which stages hold which modules and parameters."""

    def __init__(self, model: nn.Module, learnt: Learnt) -> None:
        self._model, self._blocks = model, learnt.blocks
        self._recording = learnt.recordings[0]
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        first = names.index(learnt.blocks.blocks[0])
        self._is_before = {name: index < first for index, name in enumerate(names)}

    def _stage_at(self, time: int) -> int:
        begins = [self._recording.begins[name][0] for name in self._blocks.blocks]
        if time >= self._recording.ends[self._blocks.blocks[-1]][0]:
            return self._blocks.stage_of(len(begins))
        return self._blocks.stage_of(sum(begin <= time for begin in begins) - 1)

    def of_module(self, name: str) -> set[int]:
        """The stages that call it or a module in it, or use a parameter of it."""
        module = self._model.get_submodule(name)
        prefix = f"{name}." if name else ""
        stages = {
            self._stage_at(time)
            for child, _ in module.named_modules()
            for time in self._recording.begins.get((prefix + child).rstrip("."), ())
        }
        for parameter in module.parameters():
            stages |= self._at(self._recording.outer_uses.get(id(parameter), ()))
        return stages or {0 if self._is_before[name] else self._blocks.num_stages - 1}

    def of_parameter(self, parameter: nn.Parameter) -> set[int]:
        """The stages that use a parameter of a module that is not called as one."""
        return self._at(self._recording.parameter_uses.get(id(parameter), ())) or {0}

    def _at(self, times: Iterable[int]) -> set[int]:
        return {self._stage_at(time) for time in times}

    def is_called(self, name: str) -> bool:
        return name in self._recording.begins


def _walk(
    model: nn.Module, learnt: Learnt
) -> Iterator[tuple[str, nn.Module | nn.Parameter, set[int]]]:
    """Modules and parameters that are held or not held as a whole, and the stages that do."""
    ownership = _Ownership(model, learnt)
    blocks = learnt.blocks
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> Iterator[Any]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if name in blocks.blocks:
            return
        is_above = name == "" or name == blocks.name or blocks.name.startswith(f"{name}.")
        if not is_above:
            if not any(True for _ in module.parameters()):
                return  # it costs nothing, and other stages may need what it computes
            is_empty = not any(
                ownership.is_called(f"{name}.{child}".rstrip("."))
                for child, _ in module.named_modules()
            )
            if ownership.is_called(name) or is_empty:
                yield name, module, ownership.of_module(name)
                return
        for key, parameter in module._parameters.items():
            if parameter is not None:
                path = f"{name}.{key}" if name else key
                yield path, parameter, ownership.of_parameter(parameter)
        for key, child in module._modules.items():
            if child is not None:
                yield from visit(f"{name}.{key}" if name else key, child)

    yield from visit("", model)


# ---- Stages ----------------------------------------------------------------------------------


def _build(
    model: nn.Module, learnt: Learnt, index: int, held: set[str], *, with_hooks: bool
) -> nn.Module:
    """A stage. ``held``: what it holds though it is another stage's, by name."""
    blocks = learnt.blocks
    start, end = blocks.start(index), blocks.end(index)
    enters = learnt.crossings[index - 1] if index else None
    leaves = learnt.crossings[index] if index < len(learnt.crossings) else None
    exchange: dict[int, Any] = {}
    for number, name in enumerate(blocks.blocks):
        if start <= number < end:
            continue
        block = model.get_submodule(name)
        stand_in: PassThrough
        if number < start and enters is not None:
            output = _follow(model, learnt, learnt_outputs(learnt, name, 0), enters, name)
            if number == start - 1 and enters.output is not None:
                stand_in = Entry(block, name, output, enters.output)
            else:
                stand_in = StandIn(block, name, (output,))
        elif number == end and leaves is not None and leaves.argument is not None:
            stand_in = Exit(block, name, leaves.argument)
        else:
            stand_in = StandIn(block, name)
        exchange[id(block)] = stand_in
    absent_parameters: list[tuple[str, nn.Parameter]] = []
    for name, owned, stages in _walk(model, learnt):
        if index in stages or name in held:
            continue
        if isinstance(owned, nn.Parameter):
            absent_parameters.append((name, owned))
            continue
        count = len(learnt.recordings[0].outputs.get(name, ()))
        outputs = []
        if enters is not None and min(stages) < index:
            outputs = [
                _follow(model, learnt, learnt_outputs(learnt, name, call), enters, name)
                for call in range(count)
            ]
        exchange[id(owned)] = StandIn(owned, name, outputs)
    stage = clone_tree(model, exchange, with_hooks=with_hooks)
    for name, parameter in absent_parameters:
        parent, _, key = name.rpartition(".")
        holder = stage.get_submodule(parent)
        del holder._parameters[key]
        fill = float("nan") if parameter.dtype.is_floating_point else 0
        nothing = torch.full((), fill, dtype=parameter.dtype, device=parameter.device)
        holder.register_buffer(key, nothing.expand(parameter.shape), persistent=False)
    if enters is not None and enters.output is None and enters.argument is not None:
        first = stage.get_submodule(blocks.blocks[start])
        hook = ReceiveAtEntry(enters.argument)
        first.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    leaving = None
    if leaves is not None and leaves.argument is None:
        assert leaves.output is not None
        last = stage.get_submodule(blocks.blocks[-1])
        handle = last.register_forward_hook(LeaveAtExit(leaves.output))
        leaving = (last, handle.id)
    absent = _absent_inputs(model, learnt, enters) if enters is not None else {}
    stage.forward = StageForward(  # type: ignore[assignment]
        stage,
        stage.forward,
        is_first=index == 0,
        is_last=index == blocks.num_stages - 1,
        signature=learnt.signature,
        absent=absent,
        absent_parameters=[name for name, _ in absent_parameters],
        fixed=learnt.fixed,
        leaving=leaving,
    )
    return stage


def _absent_inputs(model: nn.Module, learnt: Learnt, crossing: Crossing) -> dict[str, TreeTemplate]:
    absent = {}
    for name in learnt.inputs[0]:
        observed = [Observed.of(inputs[name]) for inputs in learnt.inputs]
        try:
            absent[name] = _follow(model, learnt, observed, crossing, f"input {name}")
        except ValueError:
            if learnt.examples[0][0]:  # positional
                raise
            # Given by keyword, as it was in the example, it is not absent.
    return absent


def learnt_outputs(learnt: Learnt, name: str, call: int) -> list[Observed]:
    """What a module's call returned, per run."""
    return [recording.outputs[name][call] for recording in learnt.recordings]


def _follow(
    model: nn.Module, learnt: Learnt, observed: list[Observed], crossing: Crossing, what: str
) -> TreeTemplate:
    try:
        return TreeTemplate.learn(observed, crossing.shapes, crossing.dtype)
    except NoRule:
        sizes = [
            [getattr(leaf, "sizes", None) for leaf in tree.leaves if hasattr(leaf, "sizes")]
            for tree in observed
        ]
        raise ValueError(
            _message(
                model,
                f"the sizes of {what!r} ({sizes}) do not follow from those of the hidden state "
                f"({list(crossing.shapes)})",
            )
        ) from None


# ---- Is it right? ----------------------------------------------------------------------------


def _examine(model: nn.Module, learnt: Learnt) -> list[set[str]]:
    """What each stage must hold beside its own: modules in front of the blocks whose output its
    blocks are given. ValueError if a stage depends on a value that it cannot have.
    """
    args, kwargs = learnt.examples[0]
    held: list[set[str]] = []
    hidden: Any = None
    for index in range(learnt.blocks.num_stages):
        needed: set[str] = set()
        while True:
            stage = _build(model, learnt, index, needed, with_hooks=False)
            dependence = Dependence()
            forward: Any = stage.forward
            forward.labels = dependence
            for name in forward.absent_parameters:
                dependence.mark(stage.get_buffer(name), name)
            given = args if index == 0 else (hidden,)
            later = {name: kwargs[name] for name in kwargs if index == 0 or name in kwargs}
            try:
                with dependence:
                    output = stage(*given, **later)
            except Exception as error:
                raise ValueError(
                    _message(model, f"stage {index} does not run without the others: {error!r}")
                ) from error
            labels = {
                label for leaf in pytree.flatten(output)[0] for label in dependence.labels_of(leaf)
            }
            _refuse(model, learnt, index, labels)
            if labels <= needed:
                break
            needed |= labels
        held.append(needed)
        with_nothing_followed: Any = stage.forward
        with_nothing_followed.labels = None
        hidden = stage(*given, **later)
    return held


def _refuse(model: nn.Module, learnt: Learnt, index: int, labels: set[str]) -> None:
    inputs = sorted(label[len("input ") :] for label in labels if label.startswith("input "))
    if inputs:
        raise ValueError(
            _message(
                model,
                f"stage {index} needs the model's input {inputs[0]!r}, which only the first stage "
                "is given (a skip connection past the blocks, or a mask made of it?); give it by "
                f"keyword, so that every stage has it: mb_kwargs={{{inputs[0]!r}: ...}}",
            )
        )
    blocks = sorted(label for label in labels if label in learnt.blocks.blocks)
    if blocks:
        raise ValueError(
            _message(
                model,
                f"what stage {index} computes depends on blocks of other stages ({blocks[0]!r}) "
                "other than by the hidden state",
            )
        )


def _compare(stages: list[nn.Module], learnt: Learnt, name: str) -> None:
    for (args, kwargs), answer in zip(learnt.examples, learnt.answers):
        output = run_stages(stages, args, kwargs)
        leaves = pytree.flatten(output)[0]
        if len(leaves) != len(answer):
            raise ValueError(
                f"the stages of {name} return {len(leaves)} tensors where the model returns "
                f"{len(answer)}: it returns values of blocks beside the hidden state "
                "(output_hidden_states, output_attentions?), which only their own stages have"
            )
        for got, expected in zip(leaves, answer):
            if not _is_same(got, expected):
                raise ValueError(
                    f"the stages of {name} do not compute what the model computes on the example "
                    f"(largest difference {_difference(got, expected)}). Does it draw random "
                    "numbers other than by dropout, or keep state from call to call? In eval() it "
                    "may not"
                )


def run_stages(stages: list[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """All stages in order, each with all keyword arguments."""
    output = stages[0](*args, **kwargs)
    for stage in stages[1:]:
        output = stage(output, **kwargs)
    return output


def _is_same(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if got.is_meta or not got.dtype.is_floating_point:
        return got.is_meta or torch.equal(got, expected)
    # Bit for bit where kernels are deterministic; some of those on a GPU are not.
    try:
        torch.testing.assert_close(got, expected, equal_nan=True)
    except AssertionError:
        return False
    return True


def _difference(got: Tensor, expected: Tensor) -> str:
    if got.shape != expected.shape:
        return f"shapes {tuple(got.shape)} and {tuple(expected.shape)}"
    return f"{(got.double() - expected.double()).abs().max().item():.2g}"


__all__ = ["as_tensors", "run_stages", "split_modules"]
