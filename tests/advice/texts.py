"""The texts of the source that say what to do, and where those without a row are followed."""

import ast
import re

VERBS = (
    "give|call|use|wrap|make|write|name|hook|register|leave|pass|set|run|load|shard|split|pad|say|"
    "copy|save|choose|do|keep|compute|step|remove|reduce|see|state|begin|bring|put|delete|add|"
    "restore|take|read|let|download|pip"
)

# Texts that have no row: where their advice is followed, or why not here.
ELSEWHERE = {
    "give a name for each layer of experts": "integrations/test_vllm_files",
    "give the run's eagle_aux_hidden_state_layer_ids": "integrations/test_vllm_files",
    "read it when the request has finished": "integrations/test_vllm_files",
    "to_datasets: batch": "records/store/test_reading",
    "to_datasets: batches of": "records/store/test_reading",
    "loader: a batch of": "records/store/test_row_loader",
    "loader: this state is not of this stream": "records/store/test_row_loader",
    "give a smaller batch_rows": "records/store/test_row_loader",
    "give names of records that differ in their last dim alone": "records/store/test_row_loader",
    "leave out of='sequence'": "integrations/test_past_positions",
    "positions of the call, such as 'last', without of=": "integrations/test_past_positions",
    "has a cache and gradients; run it under torch.no_grad()": "integrations/test_past_positions",
    "use a FlexModel of this model without dp_batch": "fingerprints/: refused runs",
    "give batches of that size, or make the stage without input_args": "pipelining/"
    "test_pipelining_edges: stages that torch traced",
    "checkpoint(..., use_reentrant=False)": "layouts/test_gradients: recomputed blocks",
    "in continuous batching, which packs the rows": "test_continuous_batching",
    "flex_model was tested with": "integrations/test_versions",
    "flex_model needs torch": "test_build: an import without torch",
    "draws random numbers, and drew none": "hooks/test_settled_edits: a function may draw late",
    "register_function: expected a subclass": "layouts/test_functions",
    "register_function: state forward=": "layouts/test_functions",
    "register_function: a text describes": "layouts/test_functions",
    "an autograd.Function without a contract": "layouts/test_functions",
    "which steps with hooks don't take": "test_pipelining: arguments of torch's own step",
    "make LoRA adapters before": "test_adapters: split with their layers, and by transformers",
    "load the model twice with": "needs from_pretrained on several ranks: test_other_loops",
    "run backward before restore()": "test_graphs: a backward after its store was closed",
    "wrap the model on the group's ranks only": "test_model_mesh: a half of the world",
    "wrap the model on its own ranks only": "test_model_mesh: a half of the world",
    "torch.distributed is not initialised": "no group can be made before",
    "which are not a regular grid": "test_model_mesh: groups that different layers know",
    "make no regular grid": "test_model_mesh: groups that different layers know",
    "context parallelism is not supported: hooks": "test_mesh_dims: a run in context parallelism",
    "make the mesh in ascending order": "test_model_mesh",
    "which are not an axis of this FlexModel": "test_model_mesh",
    "which span tp and a part of dp of this ": "test_model_mesh",
    "which can't be gathered while": "test_full_parameters: FSDP1 in its forward",
    "such as dp_replicate and dp_shard": "test_model_mesh: hybrid FSDP1",
    "over tensor-parallel ranks, whose layout": "test_parameters: gradients under FSDP1",
    "use context_parallel_size=1": "test_model_mesh: Megatron",
    "stages (pp_size) send no gradients": "pipelining/test_pipelining: all kinds of hooks",
    "which runs its forwards; restore": "pipelining/test_stages_of_transformers: refusals",
    "of whose length the later stages": "pipelining/test_stages_of_transformers: caches",
    "loaded with pp_size": "test_mesh_dims: Hugging Face's pipeline",
    "but the device_mesh {}; give one of them": "test_errors: what is no group and no mesh",
    "give a process_group of its ranks if": "test_model_mesh: a group of some ranks",
    "keep its layer on a device": "test_device_map: the gradient of an offloaded parameter",
    "give FlexModel a longer timeout= if it": "cuda/test_devices_cuda: threads of two devices",
    "and such parts can't be joined packed": "test_quantized: shards that unpack themselves",
    "which is not written to": "needs accelerate's offloading to disk",
    "set it before the model is dispatched": "needs accelerate's offloading",
    "reduce gradients over the ranks first": "needs Megatron's finalize_model_grads",
    "(torch.autograd.grad, as of an energy)": "layouts/test_gradients_of_others",
    "leave out rows=": "a choice of editing functions: test_editing",
    "give the size of the full tensor there": "test_errors: a contradicted expected_shape",
    "hook it to see the error": "a row of a report: test_inspection",
    "see that rank's own traceback": "another rank's failure",
    "tensors of different layouts": "a layout that differs by call",
    "see flex.wrapped_module_names": "layouts/test_statements: names that match nothing",
    "states nothing; give tp=": "layouts/test_statements: calls that say nothing",
    "fused parts of a split dim": "layouts/test_statements: fused parts of unequal sizes",
    "which the value can't stand for": "runs/test_run_from: a module that returns a part",
    "equal rows of the batch or be shared": "layouts/test_statements: an input that may hold rows",
    "by this statement, but its layer": "layouts/test_statements: against a proof",
    "it is stated to be {} along": "layouts/test_statements: against a proof",
    "now it has one of shape": "layouts/test_statements: control flow that no key shows",
    "by the operations that made it the tensor is": "layouts/test_statements: against a proof",
    "is not for a pipeline, whose micro-batches": "hooks/test_own_batch: of a pipeline",
    "see each rank's own tensor with": "parity/test_ragged_edges: that no padding joins",
    "an ActivationStore keeps records of the whole": "hooks/test_own_batch: what needs all ranks",
    "are gathered from all ranks at each call": "hooks/test_own_batch: what needs all ranks",
    "it gets the mean over all data-parallel ranks": "hooks/test_own_batch: another FlexModel",
    "and its rows are not of the batch": "parity/test_ragged_edges: a stand-in is refused",
    "one call can edit": "a thousand tensors",
    "FSDP2 adds this": "test_errors: gradients that fsdp2 accumulates",
    "outside of a step of its schedule": "test_pipelining",
    "can't be sent to": "test_save_ctx",
    "along which the batch is split into": "test_pipelining_edges",
    "make the same optimizer steps": "test_trainable",
    "run on shapes alone": "test_inspection",
    "(before); restore() and wrap again": "store/test_stored_ranks: what ranks do not agree on",
    "pip install flex_model[plots]": "visualize/test_plots: without matplotlib, and with it",
    "which a CUDA graph can't repeat": "cuda/graphs: captured on emulated GPUs",
    "pip install accelerate": "needs a GPU and no accelerate",
    "takes for the whole tensor; give the full": "test_original_api: tensor_parallel_routing",
    "run the model in the parent, or start": "test_transports: a forked child",
    "run the model and its backward before": "test_graphs: a backward after restore() works",
    "begin backward at the model's output": "sequential/test_batches_of_hooks: all are remembered",
    "give mean= or over='positions', or use": "test_editing: what needs the whole batch",
    "give source= as a tensor, or use": "test_editing: what needs the whole batch",
    "give seed=, or use batch_mode='full'": "test_editing: what needs the whole batch",
    "and take it from hook_function.parameters": "test_dry_run_edits: sharded weights",
    "instead; say so to silence this": "test_pipeline_splitting: what does not trace",
    "what was a keyword argument there; give": "test_pipeline_splitting: calls unlike the example",
    "give pipeline() an example of these": "test_pipeline_splitting: calls unlike the example",
    "give an example that does": "test_pipeline_splitting: calls unlike the example",
    "give pipeline() an example with these": "test_pipeline_splitting: other keywords",
    "with the sizes of the example only": "test_pipeline_splitting: sizes that are equal by chance",
    "whose records hold every call": "test_pipelining_edges: stages that torch traced",
    "give what this rank gives to the model": "store/test_stored_ranks: what ranks do not agree on",
    "on a file system that they share": "store/test_stored_ranks: what ranks do not agree on",
    "of the gradient, for a hook on it, with": "layouts/test_gradients: statements make it known",
    "one batch at a time, window=1": "sequential/test_engine: forward-mode, functional_call",
    "choose a target that holds that call": "sequential/test_engine: targets inside an operator",
    "give every data-parallel rank its own rows": "test_inspection",
    "hook the inputs of its experts": "test_expert_routing: other gates",
    "is not the output of its forward": "test_expert_units: what is refused",
    "selects depends on values": "test_expert_units: dry runs",
    "a kernel that computes gate and experts": "test_expert_units: a kernel that bypasses modules",
    "made by kernels of their own; load": "needs a GPU",
    "split them by the plan of transformers": "no plan of transformers splits units so",
    "gives another result than the layer's own": "test_attention_patterns: a scale of its own",
    "call it in a %%px cell, with each": "notebook/test_driver: a data-parallel model",
    "there is no GPU here; give the number": "notebook/test_driver: launch without a number",
    "pip install flex-model[notebook]": "needs an environment without ipyparallel",
    "ended ranks are still registered": "ipyparallel did not notice the end of its engines",
}


def texts(path):
    """String literals of a file that say what to do, with {} for what is filled in."""
    found, parts = [], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr):  # docstrings
            parts |= {id(part) for part in ast.walk(node) if isinstance(part, ast.Constant)}
        if id(node) in parts:
            continue
        if isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in ast.walk(node)}
            pieces = [v.value if isinstance(v, ast.Constant) else "{}" for v in node.values]
            found.append("".join(pieces))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return [text for text in found if re.search(rf"[;:] (or )?({VERBS})\b|; example|\. Hook", text)]
