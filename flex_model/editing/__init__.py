"""Ready-made editing functions: ablation, steering, projection, patching, clamping, lenses.

Example::

    from flex_model import editing

    edit = editing.zero(heads=3, num_heads=32) | editing.noise(0.1, positions="last")
    flex.register_forward_pre_hook(edit.at("model.layers.5.self_attn.o_proj"))

Each factory returns an `Edit`, an editing function for any HookFunction. `SelectionArguments`
choose the part that it edits, by indices of the unsharded model and of the whole batch.
docs/editing.md has an example of each.
"""

from flex_model.editing.ablation import clamp, mean, noise, resample, scale, zero
from flex_model.editing.directions import project_onto, project_out, steer
from flex_model.editing.edit import Edit, chain
from flex_model.editing.experiments import (
    PatchingMap,
    activation_patching,
    attribution_patching,
    path_patching,
)
from flex_model.editing.expert_load import ExpertLoad, expert_load
from flex_model.editing.gradient_experiments import (
    JacobianLens,
    integrated_gradients,
    jacobian_lens,
)
from flex_model.editing.lens import Lens, logit_lens, tuned_lens
from flex_model.editing.patching import Capture, capture, patch
from flex_model.editing.runs import Site
from flex_model.editing.splicing import splice
from flex_model.integrations.expert_routing import Routing
from flex_model.integrations.expert_units import Experts
from flex_model.selection.selectors import SelectionArguments

__all__ = [
    "Capture",
    "Edit",
    "ExpertLoad",
    "Experts",
    "JacobianLens",
    "Lens",
    "PatchingMap",
    "Routing",
    "SelectionArguments",
    "Site",
    "activation_patching",
    "attribution_patching",
    "capture",
    "chain",
    "clamp",
    "expert_load",
    "integrated_gradients",
    "jacobian_lens",
    "logit_lens",
    "mean",
    "noise",
    "patch",
    "path_patching",
    "project_onto",
    "project_out",
    "resample",
    "scale",
    "splice",
    "steer",
    "tuned_lens",
    "zero",
]
