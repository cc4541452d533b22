"""Release 0.1.0's strategies: how to gather and scatter, where to keep copies, how to run edits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from flex_model.compat.mappings import header_exchange
from flex_model.compat.parallel_state import ParallelState, check_state
from flex_model.distributed import gather, values
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Placement, Replicate, Shape, Shard, ShardLayout
from flex_model.layouts.expected_shape import check_dims, check_expected_shape, stated_by
from flex_model.layouts.resolve import SIZES, differing_axes
from flex_model.records.records import owned_copy

ExpectedShape = Sequence[int | None] | None


class BaseRoutingStrategy:
    """How a tensor gets from shards to full (the prologue) and back (the epilogue).

    Example::

        routing = ActivationTensorAllToAllRoutingStrategy
        strategy = routing.initialize(fmps, shard, (None, None, 4096))
        shard = strategy.execute_epilogue(edit(strategy.execute_prologue(shard)))
    """

    def __init__(
        self, prologue_fn: Callable[[Tensor], Tensor], epilogue_fn: Callable[[Tensor], Tensor]
    ) -> None:
        self.prologue_fn = prologue_fn
        self.epilogue_fn = epilogue_fn

    _axis: ClassVar[str] = ""  # whose ranks' shards make the full tensor; see ``communicator``

    @classmethod
    def initialize(
        cls, fmps: ParallelState, tensor: Tensor | None, expected_shape: ExpectedShape
    ) -> BaseRoutingStrategy:
        """Make a strategy that plans the transfer of each tensor anew. Local.

        Args:
            tensor: An example, for the check of ``expected_shape``'s number of dims; or None.
            expected_shape: The full shape, None for sizes that are not sharded over tp or not
                known. It states the layout: a dim in which the ranks' sizes add up to it is split
                over them in consecutive parts. Without any, a tensor must be the same on all
                tensor-parallel ranks.

        The prologue is collective over the ranks of the stage (or the tensor-parallel ones, for a
        parameter), the epilogue is local and undoes the latest prologue, and its backward is
        collective. Gradients: as those of ``all_gather_tensor_parallel`` and its kind; that of a
        tensor which all tensor-parallel ranks hold passes as each rank has it, whole or a part of a
        sum.

        Raises:
            TypeError, ValueError: an ``expected_shape`` that is none, or that contradicts what the
                ranks hold (in the prologue, on every rank); an epilogue without a prologue, or of
                another shape.
        """
        if not cls._axis:
            raise NotImplementedError(
                f"{cls.__name__} does not say how to route; use one of its subclasses"
            )
        route = _Route(fmps, cls._axis, tensor, expected_shape)
        return cls(route.gather, route.scatter)

    def execute_prologue(self, tensor: Tensor) -> Tensor:
        """The full tensor of this rank's shard."""
        return self.prologue_fn(tensor)

    def execute_epilogue(self, tensor: Tensor) -> Tensor:
        """This rank's shard of a full tensor."""
        return self.epilogue_fn(tensor)


class ParameterTensorParallelRoutingStrategy(BaseRoutingStrategy):
    """Parameters: gathered over the tensor-parallel ranks; data-parallel ranks have the same."""

    _axis = "tp"


class ActivationTensorAllToAllRoutingStrategy(BaseRoutingStrategy):
    """Activations: gathered over tp and dp in one transfer; dim 0 is the batch."""

    _axis = "grid"


class _Route:
    """The gather of one site's tensors and the scatter that undoes it, planned for each tensor."""

    def __init__(
        self, fmps: ParallelState, axis: str, example: Tensor | None, expected_shape: ExpectedShape
    ) -> None:
        self._site = f"routing of {'an activation' if axis == 'grid' else 'a parameter'}"
        check_state(fmps, self._site)
        self._fmps, self._axis = fmps, axis
        self._expected = check_expected_shape(expected_shape)
        self._exchange_headers = header_exchange(fmps, axis, self._site)
        self._context: gather.GatherContext | None = None
        self._full_shape: tuple[int, ...] | None = None
        if example is not None:
            check_dims(self._site, self._expected, [tuple(example.shape)])

    def gather(self, tensor: Tensor) -> Tensor:
        if tensor is None:  # as a gradient may be
            return tensor
        communicator = self._fmps.communicator(self._axis)
        shapes = [tuple(tensor.shape)]
        if not communicator.is_local:
            shapes = [header.shape for header in self._exchange_headers(tensor)]
        layout = self._layout(shapes, communicator.mesh)
        if communicator.is_local:
            self._full_shape = shapes[0]
            return tensor
        differing = differing_axes(layout, values.exchanged(communicator, tensor))
        if differing:
            raise ValueError(
                f"{self._site}: the ranks along {' and '.join(differing)} hold different values of "
                f"shape {tuple(tensor.shape)}, which expected_shape {self._expected} takes for the "
                "whole tensor; give the full sizes"
            )
        spec = gather.TensorSpec.of(communicator, layout, shapes, tensor.dtype)
        self._context = gather.GatherContext(spec, self._exchange_headers)
        self._full_shape = spec.full_shape
        return gather.gather(tensor, self._context)

    def scatter(self, tensor: Tensor) -> Tensor:
        if tensor is None:
            return tensor
        if self._full_shape is None:
            raise ValueError(
                f"{self._site}: an epilogue undoes a prologue, and there was none; call "
                "execute_prologue first"
            )
        if tuple(tensor.shape) != self._full_shape:
            raise ValueError(
                f"{self._site}: the epilogue expected a tensor of shape {self._full_shape}, as its "
                f"prologue gave, got {tuple(tensor.shape)}; an edit must keep the shape"
            )
        return tensor if self._context is None else gather.scatter(tensor, self._context)

    def _layout(self, shapes: list[Shape], mesh: Mesh) -> ShardLayout:
        """The layout that the sizes state; dim 0 of an activation holds rows, unless its size is
        that of one rank's.
        """
        sizes = self._expected
        check_dims(self._site, sizes, shapes)
        dp: Placement | None = Replicate()
        if self._axis == "grid" and mesh.dp_size > 1 and shapes[0]:
            dp = None if sizes is not None and sizes[0] is not None else Shard(0)
        dp, tp = stated_by(self._site, sizes, shapes, mesh, (dp, None))
        return ShardLayout(dp or Replicate(), tp or Replicate(), source=SIZES)


class BaseOffloadStrategy:
    """Where copies of tensors are kept: ``output_ptr[name]``, a list in the order of the calls.

    Example::

        strategy = CPUPagedMemoryOffloadStrategy.initialize("layers.0", records)
        strategy.execute(activation)                 # records["layers.0"][-1]: an owned copy

    The copy is complete when ``execute`` returns. Local.
    """

    def __init__(self, offload_fn: Callable[[Tensor], Any]) -> None:
        self.offload_fn = offload_fn

    @classmethod
    def initialize(cls, name: str, output_ptr: dict[str, list[Tensor]]) -> BaseOffloadStrategy:
        """Keep copies in ``output_ptr[name]``."""

        def keep(tensor: Tensor) -> None:
            output_ptr.setdefault(name, []).append(cls.copy(tensor))

        return cls(keep)

    @staticmethod
    def copy(tensor: Tensor) -> Tensor:
        """The copy that is kept. Subclasses say how it is made."""
        raise NotImplementedError(
            "BaseOffloadStrategy does not say how to copy; use one of its subclasses"
        )

    def execute(self, tensor: Tensor) -> None:
        """Keep a copy of ``tensor`` as it is now."""
        self.offload_fn(tensor)


class NullMemoryOffloadStrategy(BaseOffloadStrategy):
    """Keep nothing."""

    @classmethod
    def initialize(cls, name: str, output_ptr: dict[str, list[Tensor]]) -> BaseOffloadStrategy:
        """``output_ptr`` stays as it is."""
        return cls(lambda tensor: None)


class CPUPinnedMemoryOffloadStrategy(BaseOffloadStrategy):
    """Copies in page-locked memory of the CPU, ready for fast copies to a GPU.

    Without a GPU, in ordinary memory.
    """

    @staticmethod
    def copy(tensor: Tensor) -> Tensor:
        if not torch.cuda.is_available():
            return owned_copy(tensor)
        with torch.inference_mode(False), torch.no_grad():
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
            return pinned.copy_(tensor)


class CPUPagedMemoryOffloadStrategy(BaseOffloadStrategy):
    """Copies in ordinary memory of the CPU."""

    copy = staticmethod(owned_copy)


class GPUMemoryOffloadStrategy(BaseOffloadStrategy):
    """Copies on the tensor's own device."""

    @staticmethod
    def copy(tensor: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return tensor.detach().clone()


class BaseFunctionStrategy:
    """How an editing function is run.

    Example::

        strategy = NonValidatedFunctionStrategy.initialize(edit)
        edited = strategy.execute(module, full, save_ctx, modules)
    """

    def __init__(self, user_func: Callable[..., Any]) -> None:
        self.user_func = user_func

    @classmethod
    def initialize(cls, user_func: Callable[..., Any]) -> BaseFunctionStrategy:
        """Make the strategy of one function. Subclasses say how."""
        raise NotImplementedError(
            f"{cls.__name__} does not say how to run a function; use one of its subclasses"
        )

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns for these arguments."""
        return self.user_func(*args, **kwargs)


class NonValidatedFunctionStrategy(BaseFunctionStrategy):
    """Run the function as it is, on every rank."""

    @classmethod
    def initialize(cls, user_func: Callable[..., Any]) -> BaseFunctionStrategy:
        """TypeError if ``user_func`` can't be called. Local."""
        if not callable(user_func):
            raise TypeError(
                f"NonValidatedFunctionStrategy: expected a function, got {type(user_func).__name__}"
            )
        return cls(user_func)
