"""The first call in a plain script: nothing big is imported for it, and its errors come at once."""

import pytest

import scripts

# What counts as big: of torch, all that `import torch` itself has not imported.
IMPORTS = """
import sys, torch
BEFORE = set(sys.modules)
BIG = ("sympy", "mpmath", "torch._dynamo", "torch._inductor", "torch.distributed.tensor",
       "torch.fx.experimental.symbolic_shapes", "torch.distributed.fsdp", "transformers", "numpy")

def new():
    return {name for name in set(sys.modules) - BEFORE if name.split(".")[0] != "flex_model"}

def check(what):
    found = new()
    assert not found & set(BIG), (what, sorted(found & set(BIG)))
    assert len(found) <= 20, (what, sorted(found))

from flex_model import FlexModel, HookFunction
check("import flex_model")
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
RANK, RANKS = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

def double(module, full, save_ctx, modules):
    return full * 2
"""

MODELS = """
class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.images = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Upsample(scale_factor=2, mode="bicubic"), nn.GroupNorm(2, 8), nn.PixelUnshuffle(2),
            nn.PixelShuffle(2), nn.ChannelShuffle(2), nn.AvgPool2d(2),
        )
        self.words = nn.Embedding(9, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.norm = nn.RMSNorm(8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 9)

    def forward(self, images, words):
        features = self.images(images)
        patches = F.unfold(features, 2).mean((1, 2), keepdim=True)
        features = features.flatten(2).transpose(1, 2) + patches
        features = F.interpolate(features.mT, 6).mT + self.words(words)
        features, _ = self.lstm(self.norm(self.encoder(features)))
        scores = self.head(features)
        chosen = F.one_hot(words, 9).to(scores.dtype)
        return scores, (
            F.cross_entropy(scores.flatten(0, 1), words.flatten())
            + F.mse_loss(scores, chosen)
            + F.smooth_l1_loss(scores, chosen)
            + F.huber_loss(scores, chosen)
            + F.binary_cross_entropy(scores.sigmoid(), chosen)
            + F.binary_cross_entropy_with_logits(scores, chosen)
        )

class Columns(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_features, self.out_features = 6, 8
        self.weight = nn.Parameter(torch.randn(8, 6).chunk(RANKS)[RANK].clone())

    def forward(self, x):
        return F.linear(x, self.weight)

class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad

class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_features, self.out_features = 8, 6
        self.weight = nn.Parameter(torch.randn(6, 8).chunk(RANKS, 1)[RANK].clone())

    def forward(self, x):
        return Sum.apply(F.linear(x, self.weight))

def steps(model, sites, inputs, loss_of, **sizes):
    record, edit, backward = sites
    with FlexModel(model, activations := {}, **sizes) as flex:
        flex.register_forward_hook(HookFunction(record))
        flex.register_forward_hook(HookFunction(edit, editing_function=double))
        flex.register_full_backward_hook(
            HookFunction(backward, editing_function=double, output_name="gradient")
        )
        for _ in range(2):
            loss_of(flex(*inputs)).backward()
        with torch.no_grad():
            flex(*inputs)
        with torch.inference_mode():
            flex(*inputs)
        flex.get_module_parameter(next(name for name, _ in model.named_parameters()))
        flex.layouts()
        assert RANK or set(activations) >= {record, edit}
    check(sizes)

torch.manual_seed(0)
LAYERS = ("images.2", "encoder", "head")
IMAGES, WORDS = torch.randn(4, 3, 8, 8), torch.randint(9, (4, 6))
"""


def run(tmp_path, program, script):
    path = tmp_path / "script.py"
    path.write_text(IMPORTS + script + "\nif RANKS > 1:\n    dist.destroy_process_group()\n")
    options = ["--nproc-per-node", "2"] if program == "torchrun" else []
    return scripts.run(tmp_path, program, *options, str(path))


def test_one_process_imports_torch_only(tmp_path):
    run(tmp_path, "python", MODELS + "steps(Layers(), LAYERS, (IMAGES, WORDS), lambda x: x[1])")


def test_packages_are_imported_once_they_are_used():
    """``flex_model.sequential.run`` was an AttributeError unless something had imported it."""
    scripts.run_code(
        "import sys, flex_model\n"
        "assert 'flex_model.sequential' not in sys.modules\n"
        "flex_model.sequential.run, flex_model.pipelining.pipeline, flex_model.core.DummyModule\n"
        "assert not hasattr(flex_model, 'other')"
    )


@pytest.mark.slow
def test_ranks_import_torch_only(tmp_path):
    script = """
steps(
    nn.Sequential(Columns(), nn.Tanh(), Rows(), nn.Softmax(-1)),
    ("0", "1", "2"), (torch.randn(4, 6),), torch.sum, tensor_parallel_size=2,
)
steps(Layers(), LAYERS, (IMAGES, WORDS), lambda x: x[1], data_parallel_size=2)
model = nn.parallel.DistributedDataParallel(Layers())  # imports the compiler itself
BEFORE |= set(sys.modules)
steps(
    model, [f"module.{site}" for site in LAYERS], (IMAGES, WORDS), lambda x: x[1],
    data_parallel_size=2,
)
"""
    run(tmp_path, "torchrun", MODELS + script)


@pytest.mark.slow
@pytest.mark.parametrize(
    "differs, words",
    [("site = '0' if RANK else '2'", ["'0'", "'2'"]), ("x = x[:, RANK:]", ["(4, 6)", "(4, 5)"])],
    ids=["hook", "shape"],
)
def test_a_mismatch_in_the_first_call_is_raised_at_once(tmp_path, differs, words):
    script = f"""
import time
from flex_model import HookMismatchError
site, x = "1", torch.ones(4, 6)
{differs}
flex = FlexModel(nn.Sequential(*[nn.Identity()] * 3), {{}}, tensor_parallel_size=2)
flex.register_forward_hook(HookFunction(site, editing_function=double))
dist.barrier()
begin = time.perf_counter()
try:
    flex(x)
except (HookMismatchError, ValueError) as error:
    seconds = time.perf_counter() - begin
    assert all(word in str(error) for word in {words}), error
    assert seconds < 20, seconds  # gloo waits 30 minutes
    print("raised")
check("a mismatch")
"""
    assert run(tmp_path, "torchrun", script).count("raised") == 2
