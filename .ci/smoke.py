"""smoke.py FOLDER: flex_model is imported from FOLDER and its ops move bytes."""

import sys
import tempfile
from pathlib import Path

if len(sys.argv) > 1:
    sys.path.insert(0, sys.argv[1])

import torch

import flex_model
from flex_model._C import GatherPlan

found = Path(flex_model.__file__).parents[1]
assert len(sys.argv) < 2 or found == Path(sys.argv[1]).resolve(), found

boxes = [(rank, [0, 3 * rank], [0, 0], [4, 3]) for rank in range(2)]
plan = GatherPlan([4, 6], [[4, 3], [4, 3]], boxes, 4)
full = torch.arange(24.0).reshape(4, 6)
packed = torch.ops.flex_model.pack(full, plan.code, [0, 48], 96)
rebuilt = torch.ops.flex_model.assemble(packed, [0, 48], plan.code, [4, 6], torch.float32)
shard = torch.ops.flex_model.split(full, plan.code, 1, [4, 3])
assert torch.equal(rebuilt, full)
assert torch.equal(shard, full[:, 3:])

with tempfile.TemporaryDirectory() as folder, flex_model.FlexModel(torch.nn.Identity()) as flex:
    flex.show(html=Path(folder, "map.html"))  # its template is there

loaded = flex_model.build_info()["loaded"]
print(f"smoke: {found}:", ", ".join(f"{name} {state}" for name, state in loaded.items()))
