"""The arguments that every FlexModel is made with, checked, and the mesh that they choose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from flex_model.distributed.mesh import Mesh, initialize_from_launcher, is_distributed
from flex_model.hooks.tracking import Follow
from flex_model.integrations import model_mesh
from flex_model.integrations.mesh_sources import Source
from flex_model.layouts.sources import BatchDim, check_batch_dim
from flex_model.records.store import ActivationStore

Groups = str | Iterable[str]

#: The choices of each argument that is one.
CHOICES = {
    "edit_on": ("all", "rank0"),
    "output_ranks": ("rank0", "all"),
    "save_ctx_on": ("rank0", "all"),
    "follow": ("new", "always"),
    "batch_mode": ("micro", "full"),
    "return_on": ("last", "all"),
}

_OF_STEPS = {"batch_mode": "micro", "return_on": "last", "microbatch_dim": None}


@dataclass(frozen=True)
class Settings:
    """The arguments of ``FlexModel``, which describes them.

    Attributes:
        sizes: The tensor-, pipeline- and data-parallel sizes.

    Raises:
        ValueError, TypeError: an argument that no FlexModel can be made with.
    """

    output_ptr: dict[str, list[Tensor]] | ActivationStore
    sizes: tuple[int, int, int]
    process_group: dist.ProcessGroup | None
    device_mesh: dist.DeviceMesh | None
    edit_on: str
    output_ranks: str
    save_ctx_on: str
    timeout: float
    batch_dim: BatchDim
    follow: Follow
    batch_mode: str
    return_on: str
    microbatch_dim: int | Mapping[str, int | None] | None
    dp_batch: str | None
    pad_value: float

    def __post_init__(self) -> None:
        output_ptr, timeout = self.output_ptr, self.timeout
        if not isinstance(output_ptr, (dict, ActivationStore)):
            hint = " (copy it into a dict)" if isinstance(output_ptr, Mapping) else ""
            raise TypeError(
                "FlexModel: output_ptr must be a dict, an ActivationStore or None, got "
                f"{type(output_ptr).__name__}{hint}"
            )
        if isinstance(output_ptr, ActivationStore) and self.output_ranks != "rank0":
            raise ValueError(
                "FlexModel: output_ranks is for records in a dict; what an ActivationStore has can "
                "be read on every rank after flush()"
            )
        for name in CHOICES:
            check_choice(name, getattr(self, name))
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise ValueError(
                f"FlexModel: timeout must be a number of seconds above 0, got {timeout!r}"
            )
        check_batch_dim(self.batch_dim)
        if self.dp_batch not in (None, "global", "local"):
            raise ValueError(
                'FlexModel: dp_batch must be None, "global" (the rows of all data-parallel ranks '
                'in one tensor, padded where they differ) or "local" (each rank\'s own), got '
                f"{self.dp_batch!r}"
            )
        if isinstance(self.pad_value, bool) or not isinstance(self.pad_value, (int, float)):
            raise TypeError(f"FlexModel: pad_value must be a number, got {self.pad_value!r}")

    def check_no_steps(self) -> None:
        """TypeError: an argument sets the steps of a schedule, and there is none."""
        for name, default in _OF_STEPS.items():
            if getattr(self, name) != default:
                refuse_of_steps(name)

    def find_mesh(self, root: nn.Module, stages: Sequence[Source] = ()) -> Mesh:
        """Return the mesh that the user set, or that of the model (or its pipeline's stages); they
        must not contradict each other.
        """
        if self.sizes != (1, 1, 1):
            initialize_from_launcher()
        own = model_mesh.find(root, stages) if is_distributed() else None
        return model_mesh.choose(
            own, self.sizes, self.process_group, self.device_mesh, float(self.timeout)
        )


def check_choice(name: str, value: object) -> None:
    """ValueError for a value that is not one of an argument's choices."""
    first, second = CHOICES[name]
    if value not in (first, second):
        raise ValueError(f"FlexModel: {name} must be {first!r} or {second!r}, got {value!r}")


def refuse_of_steps(name: str) -> None:
    """TypeError: there are no steps of a schedule whose setting could change."""
    raise TypeError(
        f"FlexModel: {name} is a setting of the steps of a pipeline; wrap a schedule of "
        "torch.distributed.pipelining, FlexModel(schedule, ...), or leave it out"
    )
