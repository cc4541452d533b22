"""Runs of a model on the example, and what they show: which modules it calls, how the hidden state
passes the boundaries, which sizes values have.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint

from flex_model.integrations.keyword_arguments import takes_keyword
from flex_model.pipelining.splitting.block_list import BlockList, cannot_split, find_block_list
from flex_model.pipelining.splitting.clones import clone_tree
from flex_model.pipelining.splitting.observe import Arguments, Recording, other_examples, tensors_in
from flex_model.pipelining.splitting.templates import Crossing, Observed, Seen


@dataclass(frozen=True)
class Learned:
    """What runs on the example showed.

    Attributes:
        signature: Of the model's forward.
        fixed: Keyword arguments that are always these (``use_cache=False``).
        examples: Arguments of each run: the example, and others like it of other sizes.
        recordings: What the model did in each run.
        answers: The tensors that it returned.
        blocks: Where it is split.
        crossings: How the hidden state passes each boundary.
    """

    signature: inspect.Signature
    fixed: dict[str, Any]
    examples: list[Arguments]
    recordings: list[Recording]
    answers: list[list[Tensor]]
    blocks: BlockList
    crossings: list[Crossing]

    def positional(self) -> dict[str, list[Observed]]:
        """Positional arguments, which only the first stage gets: by name, in each run."""
        runs = [self.signature.bind_partial(*args).arguments for args, _ in self.examples]
        return {name: [Observed.of(run[name]) for run in runs] for name in runs[0]}

    def outputs(self, name: str) -> list[list[Observed]]:
        """Per call of a module, what it returned in each run."""
        return list(map(list, zip(*(recording.outputs[name] for recording in self.recordings))))


def learn(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split_spec: Mapping[str, SplitPoint],
) -> Learned:
    """Run the model on the example and on others like it. ValueError if it can't be split there."""
    twin = clone_tree(model, with_hooks=False)
    signature = inspect.signature(twin.forward)
    fixed = {"use_cache": False} if takes_keyword(twin, "use_cache") else {}
    kwargs = {**kwargs, **fixed}
    first = Recording(twin)
    with first.on():
        twin(*args, **kwargs)
    blocks = find_block_list(model, split_spec, first.calls)
    examples: list[Arguments] = []
    recordings, answers = [], []
    for example in [(args, kwargs), *other_examples(args, kwargs)]:
        recording = Recording(twin, blocks.blocks)
        try:
            with recording.on():
                output = twin(*example[0], **example[1])
        except Exception:
            if not examples:
                raise
            continue  # a size that the model does not take
        if recording.calls == first.calls:  # else nothing can be learned from it
            examples.append(example)
            recordings.append(recording)
            answers.append(tensors_in(output))
    if not answers or not answers[0]:
        raise ValueError(
            f"{type(model).__name__} returns no tensor on the example, or calls other modules each "
            "time; a pipeline's last stage must return some"
        )
    crossings = [_find_crossing(model, recordings, blocks, index) for index in blocks.boundaries]
    return Learned(signature, fixed, examples, recordings, answers, blocks, crossings)


def _find_crossing(
    model: nn.Module, recordings: list[Recording], blocks: BlockList, boundary: int
) -> Crossing:
    name, first = blocks.blocks[boundary], recordings[0]
    given = [recording.arguments[name].leaves for recording in recordings]
    if len(blocks.blocks) > 1:  # block 0 is given it where the others are
        found = first.dependent[blocks.blocks[max(boundary, 1)]]
    else:
        found = [index for index, leaf in enumerate(given[0]) if _is_float(leaf)][:1]
    if len(found) > 1:
        why = f"block {name!r} is given {len(found)} tensors that depend on the blocks before it"
        raise ValueError(cannot_split(model, why))
    leaves = [leaf for run in given for leaf in run[found[0] : found[0] + 1]] if found else []
    if not leaves or not all(map(_is_float, leaves)):
        why = f"block {name!r} is given no float tensor that depends on the block before it"
        raise ValueError(cannot_split(model, why))
    return Crossing(found[0], tuple(leaf.sizes for leaf in leaves), leaves[0].dtype)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Seen) and leaf.dtype.is_floating_point
