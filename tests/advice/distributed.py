"""Advice about tensors that are moved, and of the functions of version 0.1.0."""

import torch
from torch import nn

import models
from flex_model import distributed as fm_dist
from flex_model.distributed.header import OK, Header
from flex_model.distributed.plain import plain
from flex_model.integrations import slurm

X = models.random(2, 3)


class Odd(torch.Tensor):
    """Keeps its values where nobody else knows of."""

    @staticmethod
    def __new__(cls, elem):
        made = torch.Tensor._make_wrapper_subclass(cls, elem.shape, dtype=elem.dtype)
        made.elem = elem
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


def state():
    return fm_dist.initialize_distributed_state(nn.Identity(), 1, 1, 1)


def concatenated(dim):
    assert torch.equal(fm_dist.all_gather_tensor_parallel(X, dim, state()), X)


def sent_to_itself(received, sources, sent, targets):
    fm_dist.batch_isend_irecv_pipeline_parallel(state(), received, sources, sent, targets)
    assert all(torch.equal(one, other) for one, other in zip(received, sent, strict=True))


def told(packed):
    assert Header.unpack(packed).kind == "tensor"


def of_this_version():
    told(Header("tensor", site=7).pack(0, OK))


def of_another_version():
    """With a dtype that there is not."""
    packed = bytearray(Header("tensor", site=7, dtype=torch.float32).pack(0, OK))
    told(bytes(packed[:5] + b"\xfe" + packed[6:]))


def routed(kind, *steps):
    strategy = getattr(fm_dist, f"{kind}RoutingStrategy").initialize(state(), X, (None, 3))
    tensor = X
    for step in steps:
        tensor = getattr(strategy, f"execute_{step}")(tensor)
    assert torch.equal(tensor, X)


def offloaded(kind):
    records = {}
    getattr(fm_dist, f"{kind}OffloadStrategy").initialize("site", records).execute(X)
    assert torch.equal(records["site"][0], X)


def edited(kind):
    strategy = getattr(fm_dist, f"{kind}FunctionStrategy").initialize(torch.neg)
    assert torch.equal(strategy.execute(X), -X)


def ranks_of_slurm(**changed):
    """Of the second of two tasks on one host."""
    step = {"STEP_ID": "0", "STEP_NUM_TASKS": "2", "STEP_TASKS_PER_NODE": "2", "NODEID": "0"}
    task = {"STEP_NODELIST": "a1", "PROCID": "1", "LOCALID": "1", "JOB_ID": "7"}
    variables = {f"SLURM_{name}": value for name, value in (step | task).items()} | changed
    slurm.set_ranks(variables)
    assert variables["RANK"] == "1"


ROWS = {
    "set MASTER_ADDR to its name in the batch script": (
        lambda: ranks_of_slurm(SLURM_DISTRIBUTION="arbitrary"),
        lambda: ranks_of_slurm(SLURM_DISTRIBUTION="arbitrary", MASTER_ADDR="a1"),
    ),
    "leave {} to srun: unset it in the batch script": (
        lambda: ranks_of_slurm(WORLD_SIZE="8"),
        ranks_of_slurm,
    ),
    "only dense strided tensors with values can: hook": (
        lambda: plain(X.to_sparse()),
        lambda: plain(X.to_sparse().to_dense()),
    ),
    "keeps its values is not known; hook a module": (
        lambda: plain(Odd(X)),
        lambda: plain(Odd(X).elem),
    ),
    "is out of range for a tensor of shape {}; pass a dim": (
        lambda: concatenated(2),
        lambda: [concatenated(dim) for dim in (-2, -1, 0, 1)],
    ),
    "from itself; name each of them in both lists": (
        lambda: sent_to_itself([], [], [X], [0]),
        lambda: sent_to_itself([torch.empty_like(X)], [0], [X], [0]),
    ),
    "ranks; give a rank for each": (
        lambda: sent_to_itself([torch.empty_like(X)], [], [X], [0]),
        lambda: sent_to_itself([torch.empty_like(X)], [0], [X], [0]),
    ),
    "not a header of flex_model": (lambda: told(bytes(64)), of_this_version),
    "do all ranks run the same version, of flex_model and of torch?": (
        of_another_version,
        of_this_version,
    ),
    "does not say how to route; use one of": (
        lambda: routed("Base"),
        lambda: routed("ActivationTensorAllToAll", "prologue", "epilogue"),
    ),
    "and there was none; call execute_prologue first": (
        lambda: routed("ActivationTensorAllToAll", "epilogue"),
        lambda: routed("ActivationTensorAllToAll", "prologue", "epilogue"),
    ),
    "does not say how to copy; use one of": (
        lambda: offloaded("Base"),
        lambda: [offloaded(f"{kind}Memory") for kind in ("CPUPinned", "CPUPaged", "GPU")],
    ),
    "does not say how to run a function; use one of": (
        lambda: edited("Base"),
        lambda: edited("NonValidated"),
    ),
}
