"""Trains a hooked model by transformers' Trainer: ``python training.py HOW FOLDER``, by torchrun.

Rank 0 prints the losses, and FOLDER has the checkpoint.
"""

import json
import os
import sys
from pathlib import Path

SITE = "model.layers.0.mlp"


def mix(module, full, save_ctx, modules):
    """Every row and unit with another."""
    return full + full.flip(0) / 2 + full.flip(-1) / 4


def train(how, folder, num_ranks=1, callbacks=(), hook=None):
    """The losses, which are those of all ranks' rows. ``how``: "ddp", "fsdp2"; ``hook``: a forward
    hook of torch.
    """
    from transformers import Trainer, TrainingArguments

    import models

    texts = [1 + models.random(6, seed=i).argsort() for i in range(16)]
    rows = [{"input_ids": ids, "labels": ids} for ids in texts]
    model = models.llama().float()
    if hook is not None:
        model.get_submodule(SITE).register_forward_hook(hook)
    layers = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    settings = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4 // num_ranks,
        per_device_eval_batch_size=4 // num_ranks,
        num_train_epochs=1,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **({"fsdp": "full_shard", "fsdp_config": layers} if how == "fsdp2" else {}),
    )
    trainer = Trainer(
        model, settings, train_dataset=rows, eval_dataset=rows[:4], callbacks=list(callbacks)
    )
    trainer.train()
    logs = trainer.state.log_history
    return [{k: v for k, v in log.items() if "loss" in k} for log in logs]


def main(how, folder):
    import torch.distributed as dist

    from flex_model import HookFunction
    from flex_model.integrations.trainer import HookCallback

    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    records, shapes = {}, []

    def register(flex):
        flex.register_forward_hook(HookFunction(SITE, editing_function=mix))
        flex.register_full_backward_hook(HookFunction(SITE, output_name="gradient"))

    class Shapes(HookCallback):
        def on_step_end(self, *_, **__):
            shapes.append([tuple(r[0].shape) for _, r in sorted(records.items())])  # on rank 0

    hooks = Shapes(register, records, data_parallel_size=num_ranks)
    losses = train(how, folder, num_ranks, [hooks])
    assert hooks.flex is None
    if rank == 0:
        assert shapes == [[(4, 6, 32)] * 2] * 4, shapes
        print(json.dumps(losses))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort an orderly exit now and then


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(*sys.argv[1:])
