"""A training step of every model that transformers lists for a task and that can be built tiny,
under DDP and FSDP2, and of the causal ones by their plans of tensor parallelism: what each module
gives is recorded, features are mixed at four of them, forward and backward. `make sweep` runs it;
it takes a quarter of an hour on two cores.
"""

import copy
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

import tiny_models
from flex_model import FlexModel, HookFunction
from shared_edits import mixing_features
from tiny_models import TASKS, batch_of, class_names, tiny_model
from training_steps import SHARDINGS, difference, my_rows, rows_of, shard, without_scalars

pytest.importorskip("transformers")
NAMES = {name: task for task in TASKS for name in class_names(task)}
#: Modules whose outputs are no rows of the batch in their order.
REFUSED = {
    "(Bart|MBart|PLBart|Mvp|BigBirdPegasus)ForSequence": "classification_head",  # boolean masks
    "ProphetNet": "decoder",  # one gather joins rows by batch and rows by n-gram
    "Longformer|LED": "^(?!.*embed)",  # rows of global attention by nonzero, chunks by as_strided
    "JetMoe": "^(?!.*embed)",  # experts are a part of its attention
    "Tapas": "^(?!.*(word|token_type)_embeddings)",  # segments of all rows in one index
}
#: Layers that read weights of others, which FSDP2 has sharded.
ONLY_DDP = ("SqueezeBert",)
#: Where gradients along tp are whole in a part of the features, and a sum in the others.
LATENT = re.compile("kv_a_proj_with_mqa")
#: Its linear attention begins with zeros that are as wide as a rank's keys.
UNKNOWN_ZEROS = pytest.param(
    "MiniMaxForCausalLM", marks=pytest.mark.xfail(reason="a placement that is not known")
)
EXPERTS = re.compile(r"(^|\.)experts\.")  # called with tokens of their own, by some ranks only


@pytest.mark.sweep
@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize("name", NAMES)
def test_a_training_step(name):
    warnings.simplefilter("ignore")  # of transformers; the pool sets them anew for each test
    model, batch = built(name)
    plain = twin(copy.deepcopy(model), batch, {})
    sites = [site for site in plain["trained"] if is_hooked(name, site, plain["records"])]
    edits = [sites[len(sites) * part // 5] for part in range(1, 5)]
    expected = twin(copy.deepcopy(model), batch, edits)
    if not all(grad is None or grad.isfinite().all() for grad in expected["weights"].values()):
        pytest.skip("the twin's gradients are not finite")
    hooks = [site for site in expected["records"] if is_hooked(name, site, expected["records"])]
    expected["records"] = {site: expected["records"][site] for site in hooks}
    for how in SHARDINGS[: 1 if name.startswith(ONLY_DDP) else None]:
        sizes = {"data_parallel_size": dist.get_world_size()}
        found = sharded(shard(model, how), sizes, my_rows(batch), hooks, edits)
        assert_same(how, found, expected)


@pytest.mark.sweep
@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize(
    "name",
    [UNKNOWN_ZEROS if one in UNKNOWN_ZEROS.values else one for one in class_names("CAUSAL_LM")],
)
def test_a_plan_of_tensor_parallelism(name, tmp_path, monkeypatch):
    warnings.simplefilter("ignore")
    monkeypatch.setitem(tiny_models.SIZES, tiny_models.KEY_VALUE_HEADS, 2)
    model, batch = built(name)
    loaded, whole = planned(model, batch, tmp_path)
    plain = twin(copy.deepcopy(whole), batch, {})
    sites = [site for site in plain["trained"] if is_hooked(name, site, plain["records"])]
    sites = [site for site in sites if not LATENT.search(site)]
    edits = [sites[len(sites) * part // 5] for part in range(1, 5)]
    expected = twin(whole, batch, edits)
    hooks = [site for site in expected["records"] if is_hooked(name, site, expected["records"])]
    expected["records"] = {site: expected["records"][site] for site in hooks}
    found = sharded(loaded, {"tensor_parallel_size": 2}, batch, hooks, edits)
    assert_same("its plan", found, expected)


def planned(model, batch, folder):
    """The model as transformers loads it by its plan, and whole; skipped where it has none, or
    computes something else by it.
    """
    from transformers.distributed import DistributedConfig

    if not model.tp_plan:
        pytest.skip("it has no plan")
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()

    def load(**how):
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        found = type(model).from_pretrained(folder, dtype=torch.float64, **eager, **how).train()
        for module in found.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return found

    try:
        bare, whole = load(distributed_config=DistributedConfig(tp_size=2)), load()
        for one in (bare, whole):
            one(**batch).loss.backward()
    except Exception as error:
        pytest.skip(f"{type(error).__name__}: {error}")
    gradients = {name: one.grad for name, one in whole.named_parameters()}
    for name, one in bare.named_parameters():
        full = one.full_tensor() if isinstance(one, DTensor) else one
        if not torch.equal(full, whole.get_parameter(name)):
            pytest.skip(f"sharded by transformers, its {name} differs from the twin's")
        if isinstance(one, DTensor) and not one.placements[0].is_replicate():
            continue
        own = one.grad.to_local() if isinstance(one.grad, DTensor) else one.grad
        if difference(name, own, gradients[name]):
            pytest.skip(f"sharded by transformers, its gradient of {name} differs from the twin's")
    for one in (bare, whole):
        one.zero_grad(set_to_none=True)
    return bare, whole


def built(name):
    """The model and a batch; what can't be built or trained like this is skipped."""
    batch = batch_of(NAMES[name])
    try:
        model = without_scalars(tiny_model(name))
        losses = [copy.deepcopy(model)(**rows_of(batch, part, 2)).loss for part in range(2)]
        whole = copy.deepcopy(model)(**batch).loss
        torch.manual_seed(1)
        again = copy.deepcopy(model)(**batch).loss
    except Exception as error:
        pytest.skip(f"{type(error).__name__}: {error}")
    if difference("loss", again, whole):
        pytest.skip("it draws random numbers, by which it differs from its twin")
    if difference("loss", sum(losses) / 2, whole):
        pytest.skip("the loss of all rows is not the mean of the ranks'")
    return model, batch


def is_hooked(name, site, records):
    refused = next((re.compile(p) for start, p in REFUSED.items() if re.match(start, name)), None)
    if site == "" or EXPERTS.search(site) or (refused and refused.search(site)):
        return False
    return records[site][0].ndim > 1  # a loss is of all rows


def twin(model, batch, edits):
    """What the unsharded model gives at each module, and its gradients; ``trained``: the modules
    that are called once, with features that have a gradient.
    """
    records, gradients, trained = {}, {}, {}
    for name, module in model.named_modules():

        def hook(module, args, output, name=name):
            leaves, spec = tree_flatten(output)
            places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            if not places:
                return None
            records.setdefault(name, []).append(leaves[places[0]].detach().clone())
            trained[name] = leaves[places[0]].requires_grad and len(records[name]) == 1
            if name not in edits:
                return None
            edited = mixing_features(module, leaves[places[0]], None, None).clone()
            edited.register_hook(lambda grad: gradients.update({name: grad.clone()}))
            leaves[places[0]] = edited
            return tree_unflatten(leaves, spec)

        module.register_forward_hook(hook)
    loss = model(**batch).loss
    loss.backward()
    weights = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        "loss": loss.detach(),
        "records": records,
        "trained": [name for name, is_once in trained.items() if is_once],
        "gradients": gradients,
        "weights": weights,
    }


def sharded(model, sizes, batch, hooks, edits):
    """The same of the ranks; ``batch``: what this one has. Collective."""
    records = {}
    with FlexModel(model, records, output_ranks="all", **sizes) as flex:
        for site in hooks:
            edit = mixing_features if site in edits else None
            flex.register_forward_hook(HookFunction(site, editing_function=edit))
        for site in edits:
            hook_function = HookFunction(site, output_name=f"{site}.grad")
            flex.register_full_backward_pre_hook(hook_function)
        loss = flex(**batch).loss
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return {
            "loss": total / dist.get_world_size(),
            "records": {site: records[site] for site in hooks},
            "gradients": {site: (records.get(f"{site}.grad") or [None])[0] for site in edits},
            "weights": {
                name.removeprefix("module."): flex.get_module_gradient(name)  # DDP's
                for name, _ in model.named_parameters()
            },
        }


def assert_same(how, found, expected):
    """All that differs, in one message."""
    lines = [difference("loss", found["loss"], expected["loss"])]
    for site, tensors in expected["records"].items():
        calls = len(found["records"][site])
        if calls != len(tensors):
            lines.append(f"{site}: {calls} records, expected {len(tensors)}")
        for one, other in zip(found["records"][site], tensors):
            lines.append(difference(site, real(one), real(other)))
    for kind in ("gradients", "weights"):
        for name, tensor in expected[kind].items():
            lines.append(difference(f"gradient of {name}", found[kind][name], tensor))
    lines = [line for line in lines if line]
    assert not lines, "\n".join([f"under {how}:", *lines])


def real(tensor):
    """Its numbers, finite ones for what masks are made of."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return torch.nan_to_num(tensor) if tensor.is_floating_point() else tensor
