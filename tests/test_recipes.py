"""The code of docs/recipes, on one process and on two, against the unsharded model in torch."""

import contextlib
import copy
import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import doc_pages
import mixtures
import models
from flex_model import FlexModel

pytest.importorskip("transformers")

TWO = pytest.mark.ranks(2, timeout=120)
PAGES = sorted((doc_pages.ROOT / "docs" / "recipes").glob("*.md"))
KINDS = ["one", *(pytest.param(k, marks=TWO) for k in ("tp", "ddp", "fsdp2"))]
BATCH = torch.randint(64, (4, 6), generator=torch.Generator().manual_seed(5))


@contextlib.contextmanager
def recipe(name, **scope):
    """What the page defines, where the reader has defined ``scope``."""
    page = doc_pages.read(doc_pages.ROOT / "docs" / "recipes" / f"{name}.md")
    exec(compile(page.code, page.path, "exec"), scope)
    try:
        yield scope
    finally:
        for value in scope.values():
            if isinstance(value, FlexModel):
                value.restore()


def sharded(kind, model):
    model = copy.deepcopy(model)
    if kind == "tp":
        llama = models.tensor_parallel_llama(
            getattr(model, "inner", model), models.mesh(1, 2)["tp"]
        )
        return type(model)(llama) if hasattr(model, "inner") else llama
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        for layer in getattr(model, "inner", model).model.layers:
            fully_shard(layer)
        return fully_shard(model)
    return model


def rows_of(kind, batch):
    return batch.chunk(2)[dist.get_rank()] if kind in ("ddp", "fsdp2") else batch


def test_each_page_is_tested_and_short():
    for page in PAGES:
        assert len(page.read_text().splitlines()) <= 40, page.name
        assert f'recipe("{page.stem}"' in Path(__file__).read_text(), page.name


# ---- Muon ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_muon(kind):
    model, expected = models.llama(), models.llama()
    with recipe("muon", model=sharded(kind, model)) as page:
        matrices = {n: w for n, w in expected.named_parameters() if ".layers." in n and w.dim() > 1}
        assert {name.removeprefix("module.") for name in page["matrices"]} == set(matrices)
        buffers = {name: torch.zeros_like(weight) for name, weight in matrices.items()}
        for step in range(3):
            tokens = BATCH.roll(step)
            page["optimizer"].zero_grad()
            page["flex"](rows_of(kind, tokens)).logits.square().mean().backward()
            page["optimizer"].step()
            expected.zero_grad()
            expected(tokens).logits.square().mean().backward()
            for name, weight in matrices.items():
                buffers[name].mul_(0.95).add_(weight.grad)
                update = page["orthogonal"](weight.grad + 0.95 * buffers[name])
                weight.data -= 0.02 * update
                values = torch.linalg.svdvals(update)
                assert values.max() < 1.3, name
        for name, weight in matrices.items():
            assert_close(page["flex"].get_module_parameter(name), weight.detach(), msg=name)


def test_newton_schulz_makes_singular_values_about_one():
    with recipe("muon", model=models.llama()) as page:
        for shape in ((8, 12), (12, 8)):
            values = torch.linalg.svdvals(page["orthogonal"](models.random(*shape)))
            assert values.min() > 0.6 and values.max() < 1.3, values


# ---- Router replay -------------------------------------------------------------------------------


BLOCKS = ["model.layers.0.mlp", "model.layers.1.mlp"]


def mixture(kind, folder):
    model = mixtures.make("Qwen3Moe").float()
    if kind == "tp":
        return models.loaded_by_transformers(model, folder)
    return sharded(kind, model)


def chosen_by_hand(model):
    """The routes of a forward in plain torch."""
    found, handles = {}, []
    for block in BLOCKS:
        gate = model.get_submodule(block).gate
        handles.append(
            gate.register_forward_hook(
                lambda module, args, output, block=block: found.update({block: output[2]})
            )
        )
    with torch.no_grad():
        model(BATCH % 48)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_router_replay(kind, tmp_path):
    """By the routes of other tokens: the experts are given them in place of the gates' indices,
    with the weights that the gates give to these.
    """
    model, others = mixtures.make("Qwen3Moe"), (BATCH % 48).flip(0)
    expected_routes = chosen_by_hand(model)
    for block in BLOCKS:
        mlp = model.get_submodule(block)

        def forward(hidden, mlp=mlp, routes=expected_routes[block]):
            flat = hidden.flatten(0, 1)
            weights = F.linear(flat, mlp.gate.weight).softmax(-1).gather(1, routes)
            if mlp.gate.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return mlp.experts(flat, routes, weights).view_as(hidden)

        mlp.forward = forward
    expected = model(others, labels=others)
    expected.loss.backward()

    with recipe("router_replay", model=mixture(kind, tmp_path)) as page:
        routes = page["routes_of"](rows_of(kind, BATCH % 48))
        for block in BLOCKS:
            assert torch.equal(routes[block], expected_routes[block])
        rows = rows_of(kind, others)
        output = page["replayed"](rows, routes, labels=rows)
        output.loss.backward()
        assert_close(output.logits, rows_of(kind, expected.logits), rtol=1e-4, atol=1e-5)
        for block in BLOCKS:
            name = f"{block}.gate.weight"
            assert_close(
                page["flex"].get_module_gradient(name),
                model.get_parameter(name).grad,
                rtol=1e-4,
                atol=1e-6,
            )


# ---- A teacher and a student ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("teacher_kind", "student_kind"),
    [
        ("one", "one"),
        pytest.param("tp", "ddp", marks=TWO),
        pytest.param("tp", "fsdp2", marks=TWO),
        pytest.param("fsdp2", "tp", marks=TWO),
    ],
)
def test_distillation(teacher_kind, student_kind):
    teacher, student = models.llama(layers=4), models.seeded(models.llama, 2, seed=9)
    mapping = models.seeded(nn.Linear, 32, 32).double()
    wrapped, mapped = sharded(student_kind, student), copy.deepcopy(mapping)
    batches = [BATCH.roll(i) for i in range(2)]
    scope = {
        "teacher_model": sharded(teacher_kind, teacher),
        "student_model": wrapped,
        "mapping": mapped,
        "optimizer": torch.optim.SGD([*wrapped.parameters(), *mapped.parameters()], lr=0.5),
        "batches": [
            (rows_of(teacher_kind, batch), rows_of(student_kind, batch)) for batch in batches
        ],
    }
    with recipe("distillation", **scope) as page:
        for batch in batches:
            step_by_hand(teacher, student, mapping, batch)
        for name, weight in student.named_parameters():
            found = page["student"].get_module_parameter(name)
            assert_close(found, weight.detach(), msg=name)
        assert_close(mapped.weight, mapping.weight)


def step_by_hand(teacher, student, mapping, tokens):
    kept, handles = {}, []
    for name, model, layer in (("taught", teacher, 3), ("learnt", student, 1)):

        def keep(module, args, output, name=name):
            kept[name] = output

        handles.append(model.model.layers[layer].register_forward_hook(keep))
    with torch.no_grad():
        teacher(tokens)
    loss = student(tokens, labels=tokens).loss
    for handle in handles:
        handle.remove()
    loss = loss + F.mse_loss(mapping(kept["learnt"]), kept["taught"])
    parameters = [*student.parameters(), *mapping.parameters()]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
        parameter.data -= 0.5 * gradient


# ---- Side data -----------------------------------------------------------------------------------


LABELS = torch.tensor([1, 0, 0, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_side_data(kind):
    model = models.llama()
    scope = {
        "model": copy.deepcopy(model),
        "shard": lambda model: sharded(kind, model),
        "rows": rows_of(kind, BATCH),
        "labels": rows_of(kind, LABELS),
    }

    def contrast(module, args, output):
        zero, one = output[1:3], output[[0, 3]]
        shift = one.mean(0) - zero.mean(0)
        return torch.stack([output[0], *(zero + shift), output[3]])

    model.model.layers[0].register_forward_hook(contrast)
    expected = model(BATCH).logits
    expected.square().mean().backward()
    with recipe("side_data", **scope) as page:
        page["logits"].square().mean().backward()
        assert_close(page["logits"], rows_of(kind, expected))
        for name, weight in model.named_parameters():
            assert_close(page["flex"].get_module_gradient(f"inner.{name}"), weight.grad, msg=name)


# ---- Counting experts ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_counting_experts(kind, tmp_path):
    expected = chosen_by_hand(mixtures.make("Qwen3Moe"))
    batches, printed = [rows_of(kind, BATCH % 48)], io.StringIO()
    model = mixture(kind, tmp_path)
    with (
        contextlib.redirect_stdout(printed),
        recipe("counting_experts", model=model, batches=batches) as page,
    ):
        for block, routes in expected.items():
            counts = routes.flatten().bincount(minlength=mixtures.NUM_EXPERTS)
            assert torch.equal(page["load"][block].counts, counts)
    assert printed.getvalue().count("entropy") == 2
