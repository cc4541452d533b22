"""Reads and writes the full parameters of a pipeline's stages, by the unsplit model's names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from flex_model.distributed.agreement import gather_checked
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.tensor_dicts import describe, from_rank
from flex_model.layouts.statements import Statements
from flex_model.layouts.tensor_site import ParameterSources
from flex_model.names import find_parameter
from flex_model.parameters.full import ExpectedShape, Parameters
from flex_model.pipelining.stages import LocalStages, StageIndex
from flex_model.selection.selectors import Selector


class StageParameters:
    """The parameters of this rank's stages, as hooks need them.

    Attributes:
        by_stage: By index of the stage: its parameters, collective over the ranks of the stage.
    """

    def __init__(
        self, root: LocalStages, communicator: Communicator, statements: Statements
    ) -> None:
        self._modules = root.by_index
        self.by_stage = {
            index: Parameters(module, communicator, statements)
            for index, module in root.by_index.items()
        }
        self._full: dict[str, Tensor] = {}

    def keep(self, full: dict[str, Tensor]) -> None:
        """Keep the full parameters that the hooks of the next step named."""
        self._full = full

    def get_on(self, name: str, device: torch.device, later: object = None) -> Tensor:
        """Return a full parameter that was kept for this step, on a device. Local."""
        return self._full[name].to(device)

    def sources_of(self, name: str) -> tuple[ParameterSources, str]:
        """Return the placements stated for a parameter, by the first stage that has it, and its
        first name there. Local.
        """
        for index, module in self._modules.items():
            with contextlib.suppress(ValueError):
                find_parameter(module, name)
                return self.by_stage[index].sources_of(name)
        raise ValueError(f"no stage of this rank has a parameter {name!r}")


class PipelineParameters:
    """The parameters of all stages of a pipeline. All methods are collective.

    Args:
        local: Those of this rank's stages.
        world, line: Communicators to all ranks, and to those of this rank's pipeline.
    """

    def __init__(
        self, local: StageParameters, index: StageIndex, world: Communicator, line: Communicator
    ) -> None:
        self._local, self._index = local, index
        self._world, self._line = world, line

    def get(
        self,
        name: str,
        expected_shape: ExpectedShape = None,
        *,
        sharded: bool = False,
        raw: bool = False,
        experts: Selector = None,
    ) -> Tensor:
        """Return the full parameter, from the first stage that has it."""
        how: Any = {"sharded": sharded, "raw": raw, "experts": experts}
        return self._read(name, lambda p: p.get(name, expected_shape, **how))

    def gradient(
        self, name: str, expected_shape: ExpectedShape = None, experts: Selector = None
    ) -> Tensor | None:
        """Return the full gradient, from the stage that has the parameter; ValueError where there
        are several.
        """
        self._index.holder_of_gradient(name, "get_module_gradient")
        return self._read(name, lambda p: p.gradient(name, expected_shape, experts))

    def iterate(self, *, raw: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield names and full parameters, one at a time."""
        names = self._index.parameter_names
        return ((name, self.get(name, sharded=True, raw=raw)) for name in names)

    def read_for_hooks(self, names: Iterable[str]) -> None:
        """Keep the full parameters that hooks of the next step named, whichever stage has them."""
        self._local.keep({name: self.get(name) for name in dict.fromkeys(names)})

    def set(
        self,
        name: str,
        full: Tensor,
        expected_shape: ExpectedShape = None,
        experts: Selector = None,
    ) -> None:
        """Write the full parameter on all stages that have it, under whatever name."""
        held = [
            (stage, other)
            for other in self._index.names_of_parameter(name)
            for stage in self._index.holders_of_parameter(other)
        ]

        def write() -> None:
            for stage, other in held:
                if stage in self._local.by_stage:
                    self._local.by_stage[stage].set(other, full, expected_shape, experts)

        gather_checked(self._world, f"a new value of parameter {name!r}", write)

    def _read(self, name: str, read: Callable[[Parameters], Tensor | None]) -> Any:
        stage = self._index.holders_of_parameter(name)[0]
        pp_rank, found = self._index.pp_ranks[stage], []

        def read_here() -> Any:
            if stage in self._local.by_stage:
                value = read(self._local.by_stage[stage])
                found.extend([] if value is None else [value])
            return describe(found)

        described = gather_checked(self._line, f"parameter {name!r}", read_here)[pp_rank]
        received = from_rank(self._line, pp_rank, found, described)
        return received[0] if received else None
