"""A Llama with two LoRA adapters of PEFT, "first" and "second", and the ways to shard it."""

import warnings

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# The layers that transformers' plans split by columns and by rows; the first of both are adapted.
COLUMNS, OTHER_COLUMNS = ("q_proj", "up_proj"), ("k_proj", "v_proj", "gate_proj")
ROWS, OTHER_ROWS = ("down_proj",), ("o_proj",)


def adapted(model, layers=COLUMNS + ROWS):
    """The model with two adapters of random weights, of which "first" is active."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=list(layers), init_lora_weights=False)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # peft reads a deprecated attribute
        torch.manual_seed(5)
        model = peft.get_peft_model(model, config, adapter_name="first")
        model.add_adapter("second", config)
    return model.double().eval()


def loaded(model, folder):
    """A model that transformers has sharded, with the adapters that ``save_pretrained`` wrote."""
    peft = pytest.importorskip("peft")
    load = peft.PeftModel.from_pretrained
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load(model, folder / "first", adapter_name="first", is_trainable=True)
        model.load_adapter(folder / "second", "second", is_trainable=True)
    model.set_adapter("first")
    return model.double().eval()


def parallelized(model, mesh):
    """An adapted model whose adapters are split with their layers: what is made by columns stays
    split, and what splits its rows is summed, in a layer and in its adapter alike.
    """
    plan = {}
    for name, module in model.named_modules():
        parts = set(name.split("."))
        if not isinstance(module, torch.nn.Linear) or "lm_head" in parts:
            continue
        is_by_columns = bool(parts & {*COLUMNS, *OTHER_COLUMNS})
        if not parts & {"lora_A" if is_by_columns else "lora_B"}:
            plan[name] = ColwiseParallel() if is_by_columns else RowwiseParallel()
    return parallelize_module(model, mesh, plan)
