"""Ranks behind a notebook: cells run on sharded models, records are looked at on the driver.

Example::

    import flex_model.notebook
    ranks = flex_model.notebook.launch(2)

    # in a cell that begins with %%px: what a torchrun script says
    model = AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(tp_size=2)
    )
    flex = FlexModel(model, activations := {})

    # in a cell of the driver
    ranks["activations"]["model.layers.3.mlp"][0]

It needs ipyparallel: ``pip install flex-model[notebook]``. docs/notebooks.md shows more.
"""

try:
    import cloudpickle  # noqa: F401
    import ipyparallel  # noqa: F401
except ImportError as error:
    raise ImportError(
        "flex_model.notebook needs ipyparallel and cloudpickle: pip install flex-model[notebook]"
    ) from error

from flex_model.notebook.cell_run import CellError
from flex_model.notebook.driver import Ranks
from flex_model.notebook.launcher import launch
from flex_model.notebook.remote import Remote, RemoteFlexModel, RemoteMapping

__all__ = ["CellError", "Ranks", "Remote", "RemoteFlexModel", "RemoteMapping", "launch"]
