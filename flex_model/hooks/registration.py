"""A registered HookFunction: its site, its groups, and the layouts found so far."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from flex_model import _C
from flex_model.distributed.header import site_hash
from flex_model.distributed.placement import Shape
from flex_model.distributed.plain import kind_of
from flex_model.errors import HookError, UnpackIndexError, text_of
from flex_model.hooks.function import HookFunction
from flex_model.integrations.keyword_arguments import arguments_by_name
from flex_model.integrations.past_positions import Positions, positions_of_forward
from flex_model.layouts.expected_shape import ExpectedShape
from flex_model.layouts.statements import ParameterSources, Site
from flex_model.names import wrapped_chain
from flex_model.pytree import leaf_names
from flex_model.selection import Select

if TYPE_CHECKING:
    from flex_model.hooks.site import ModuleSite, Moment


@dataclass(eq=False)
class Joint:
    """Several tensors of one site that one call edits. Their hooks are called one after another,
    and all but the last only keep what they gathered.

    Attributes:
        indices: The ``unpack_idx`` of each tensor, in the order of their hooks.
        gathered: By batch (see ``Run``): the inputs of the call gathered so far.
    """

    indices: tuple[int | str, ...]
    gathered: dict[int | None, list[Any]] = field(default_factory=dict)


@dataclass(eq=False)
class Registration:
    """One HookFunction at one tensor of a site.

    Attributes:
        given: The HookFunction that the user registered: the function itself, or the one on several
            tensors that has it as a member.
        joint: Shared with the other tensors of its call; None if the call edits just one.
        targets: The modules that stand for its site on this rank, or the parameter.
        moment: When a parameter's hook gets the gradient.
        index: Counts this rank's registrations with the FlexModel, removed ones included.
        number: Counts the hooks at one place: the same on every rank that has the same hooks now,
            whatever it had before.
        hook: The dispatcher's object for it (groups, activity).
        clean_name: Name of the module or parameter without wrappers' insertions, for messages.
        first_name: Of a tied parameter: the first of its clean names; else ``clean_name``.
        description: The name for messages: ``forward hook on 'layers.0.mlp'``.
        site: The hash that identifies it in headers: ranks that differ in any part of it differ in
            the hash.
        seed: Its part of the seeds of its calls: the same on any sharding.
        specs: Cached by ``(call number, shapes, dtype, ...) -> TensorSpec``.
        parameter: Of a hook on a parameter's gradient: the placements stated for the parameter.
        expected_shape: The required shape of tensors passed to the hook: the function's, or in a
            pipeline a micro-batch's part of it.
        split_dim: In a pipeline: the dim along which micro-batches split the tensor; None: they
            don't.
        places: The sites of its modules on this rank.
        had_edit: Whether it was registered with an editing function, which may be off now.
        pads: Whether it sees the tensors of data-parallel ranks padded to one length.
        writes: Whether the editing function has ever written to its full tensor; None before its
            first call.
    """

    hook_function: HookFunction
    kind: str
    index: int
    number: int
    module: weakref.ref[nn.Module] | None
    given: HookFunction
    clean_name: str
    joint: Joint | None = None
    targets: Sequence[weakref.ref[Any]] = ()
    moment: Moment = "computed"
    hook: _C.Hook = field(init=False)
    specs: dict[Any, Any] = field(default_factory=dict)
    parameter: ParameterSources = field(default_factory=ParameterSources)
    expected_shape: ExpectedShape = field(init=False)
    split_dim: int | None = None
    places: list[ModuleSite] = field(default_factory=list)
    pads: bool = False
    writes: bool | None = None
    first_name: str = field(init=False)
    had_edit: bool = field(init=False)
    site: int = field(init=False)
    seed: int = field(init=False)
    name: str = field(init=False)
    _first_call: tuple[Any, bool] | None = None  # a function, and whether it drew in its first call
    _compared: Any = None  # the function whose results ranks have compared
    description: str = field(init=False)

    def __post_init__(self) -> None:
        function = self.hook_function
        self.name = function.module_name
        self.first_name = self.clean_name
        self.description = describe_hook(self.clean_name, self.kind, function.unpack_idx)
        self.expected_shape = function.expected_shape
        self.had_edit = self.given.editing_function is not None
        self.seed = site_hash(*self.place_of(function, self.kind), self.number)
        self.site = site_hash(
            *self.place_of(function, self.kind),
            function.expected_shape,
            function.record_name,
            self.edits,
            self.number,
            *(() if function.select is None else (repr(function.select),)),
            *(() if self.joint is None or not self.edits else (self.given.unpack_idx,)),
            *(() if function.record else ("no record",)),
            *function.settings_of_module,
        )

    def expect_microbatches(self, split_dim: int | None, shape: ExpectedShape) -> None:
        """Set the dim along which micro-batches split the tensor, and the shape of a part."""
        self.split_dim, self.expected_shape = split_dim, shape

    def make_hook(self, is_served: bool) -> None:
        """Make the dispatcher's object; ``is_served``: whether the dispatcher runs the hook itself,
        on one process.
        """
        function = self.hook_function
        self.hook = _C.Hook(
            self,
            -1 if isinstance(function.unpack_idx, str) else function.unpack_idx,  # -1: not there
            function.record_name,
            self.expected_shape,
            is_served and function.record,
            is_served and self.had_edit,
        )

    def drop_hook(self) -> None:
        """Drop the dispatcher's object, which holds the registration; no garbage collector would
        see the cycle.
        """
        del self.hook
        self.places.clear()

    @staticmethod
    def place_of(function: HookFunction, kind: str) -> tuple[str, str, int | str]:
        return kind, function.module_name, function.unpack_idx

    @property
    def is_registered(self) -> bool:
        """Whether it has not been removed."""
        return any(own is self for own in self.given._registrations)

    @property
    def edits(self) -> bool:
        """Whether it calls an editing function now."""
        return self.had_edit and self.given.editing_function is not None

    @property
    def living_module(self) -> nn.Module | None:
        """Its module, if it has one that still exists."""
        return None if self.module is None else self.module()

    @property
    def living_targets(self) -> list[Any]:
        """The modules or parameters among its targets that still exist."""
        return [target for ref in self.targets if (target := ref()) is not None]

    @property
    def is_active(self) -> bool:
        """Whether the current choice makes it active at one of its modules."""
        return any(own is self for place in self.places for own in place.site(self.kind).active)

    def was_called(self, run: int) -> bool:
        """Whether one of its modules was called in that run, and its hooks there."""
        return any(site.last_run == run for place in self.places for site in place.all_sites)

    @property
    def is_first_of_joint(self) -> bool:
        return self.joint is not None and self.joint.indices[0] == self.hook_function.unpack_idx

    @property
    def calls_function(self) -> bool:
        """Whether its hook calls the function: of several tensors, the last one's does."""
        return self.joint is None or self.joint.indices[-1] == self.hook_function.unpack_idx

    @property
    def select(self) -> Select | None:
        return self.hook_function.select

    def shape_of_forward(self, tensor: Tensor) -> Shape:
        """Return the shape that the tensor has in each forward with inputs of the same key."""
        shape, select = tuple(tensor.shape), self.select
        return shape if select is None or select.experts is None else (-1, *shape[1:])

    @property
    def is_backward(self) -> bool:
        """Whether it hooks the gradient of an activation."""
        return self.kind in ("full_backward", "full_backward_pre")

    @property
    def layout_site(self) -> Site:
        """The site as the layout resolver takes it."""
        kind = "forward_pre" if self.takes_inputs else "forward"
        return Site(
            self.describe(),
            self.clean_name,
            "parameter" if self.kind == "tensor" else kind,
            self.hook_function.unpack_idx,
            self.parameter,
            self.is_backward,
        )

    def leaf(self, tree: Any) -> Tensor:
        """Return the tensor that the hook is registered for.

        Raises:
            HookError: there is none.
            UnpackIndexError: there are fewer than ``unpack_idx`` counts to.
        """
        index = self.number_in(tree)
        try:
            return _C.leaf_at(tree, index)
        except IndexError:
            count = _C.num_leaves(tree)
        what = "input" if self.takes_inputs else "output"
        if count == 0:
            raise HookError(
                f"{self.describe()}: expected a tensor in the module's {what}, got none "
                f"({_brief(tree)}); hook another module, or register the container's type with "
                "flex_model.pytree.register"
            )
        raise UnpackIndexError(
            f"{self.describe()}: unpack_idx {index} is out of range, the module's {what} holds "
            f"{count} tensor{'s' * (count > 1)}; give an unpack_idx from 0 to {count - 1}"
        )

    def positions_of_forward(self) -> Positions | None:
        """Return the positions of the running forward in its sequence, if the selection counts
        those.

        Raises:
            HookError: they are not known.
        """
        counts = self.select is not None and self.select.counts_sequence
        return positions_of_forward(self.describe()) if counts else None

    @property
    def takes_inputs(self) -> bool:
        """Whether its tensor is among the module's inputs, not its outputs."""
        return self.kind in ("forward_pre", "full_backward")

    def number_in(self, tree: Any) -> int:
        """Return the number of its tensor in a module's output, or in ``(args, kwargs)``.

        Raises:
            UnpackIndexError: no tensor has the name that it was given.
        """
        index = self.hook_function.unpack_idx
        if not isinstance(index, str):
            return int(index)
        if self.takes_inputs:
            tree = arguments_by_name(wrapped_chain(self.living_targets[0])[-1], *tree)
        names = leaf_names(tree)
        if index in names:
            return names[index]
        held = ", ".join(map(repr, filter(None, names))) or "none that has a name"
        raise UnpackIndexError(
            f"{self.describe()}: in this call no {'input' if self.takes_inputs else 'output'} of "
            f"the module is a tensor of the name {index!r} (it is None, no tensor, or not there); "
            f"there are {held}; give one of these names, or the tensor's number"
        )

    def failure(self, error: BaseException) -> str:
        """Return the message for an error of this hook's call."""
        text = str(error) if isinstance(error, HookError) else text_of(error)
        if self.describe() in text:
            return text
        what = "the editing function" if self.edits else "reading the tensor"
        return f"{self.describe()}: {what} raised {text}"

    def state(self, sources: ParameterSources, first_name: str) -> None:
        """Set the placements that are stated for the parameter whose gradient it gets, and the
        parameter's first name.
        """
        self.parameter, self.first_name = sources, first_name

    @property
    def draws(self) -> bool | None:
        """Whether the editing function draws random numbers, as its first call did; None before
        that.
        """
        function, has_drawn = self._first_call or (None, False)
        if self.given.draws:
            return True
        return has_drawn if function is self.given.editing_function else None

    def note_first_call(self, has_drawn: bool) -> None:
        """Record whether the first call of the editing function drew random numbers."""
        self._first_call = self.given.editing_function, has_drawn

    @property
    def is_compared(self) -> bool:
        """Whether ranks have compared a result of the editing function."""
        return self._compared is self.given.editing_function

    def note_compared(self) -> None:
        """Record that the ranks' results of a call of the editing function are the same."""
        self._compared = self.given.editing_function

    def note_writes(self, has_written: bool) -> None:
        """Record whether a call of the editing function wrote to its tensor."""
        self.writes = self.writes or has_written

    def check_movable(self, leaf: Tensor, is_recorded: bool = False) -> None:
        """TypeError for tensors that are not plain strided ones, or have no values to record."""
        kind = kind_of(leaf)
        if kind == "meta":  # a dry run may use such tensors
            if is_recorded:
                without = ", leave the record out by HookFunction(..., record=False)" * self.edits
                raise TypeError(
                    f"{self.describe()}: the tensor is on the device 'meta', so it has no values "
                    f"to record; get shapes by flex.dry_run(...){without}, or run the model with "
                    "the weights of its checkpoint by flex_model.sequential.run(...)"
                )
        elif kind:
            advice = "; hook a module whose tensor is dense"
            if self.kind == "tensor":
                advice = SPARSE_GRADIENT
            elif kind == "nested":
                advice += " (nn.TransformerEncoder(..., enable_nested_tensor=False) has no others)"
            raise TypeError(
                f"{self.describe()}: the tensor is {kind}, and only dense strided tensors can be "
                f"gathered{advice}"
            )

    def describe(self) -> str:
        """Return the name for messages: ``description``."""
        return self.description


SPARSE_GRADIENT = "; make its module with sparse=False, as nn.Embedding(..., sparse=False)"


def describe_hook(name: str, kind: str, unpack_idx: Any) -> str:
    """Return the name of a hook for messages, as ``Registration.describe``."""
    kind = "parameter-gradient" if kind == "tensor" else kind.replace("_", "-")
    which = f", tensor {unpack_idx!r}" if unpack_idx else ""
    return f"{kind} hook on {name!r}{which}"


class HookHandle:
    """Returned by the ``register_*`` methods; ``remove()`` removes the hook, repeated calls do
    nothing.

    Also a context manager that removes the hook at its end.
    """

    def __init__(self, remove, hook_function: HookFunction) -> None:
        self._remove = remove
        self.hook_function = hook_function

    def remove(self) -> None:
        """Remove the hook; it can be registered again. Local: call it on every rank."""
        if self._remove is not None:
            remove, self._remove = self._remove, None
            remove()

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def _brief(tree: Any) -> str:
    text = f"a {type(tree).__name__}: {tree!r}"
    return text if len(text) < 120 else text[:117] + "..."
