"""`python tests/mutations.py`: thirty wrong versions of the library, which `make test` finds.

Each mutation is made in a copy of the tree, and the tests that must fail are run there. Those that
pass all the same are listed at the end: a test is missing. Arguments choose mutations by a part of
their name or file. `test_mutations.py` checks that the texts are still there.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "build", "site", "__pycache__", ".*_cache")
FAILED, TIMEOUT_S = 1, 600


class Mutation(NamedTuple):
    """``old``, which is in the file once, is replaced by ``new``: then one of ``tests`` fails."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    # Gather and scatter.
    Mutation(
        "a scatter that keeps another rank's shard",
        "distributed/gather.py",
        "_C.split_into(self.plan, self.rank, on_cpu(full), shard)",
        "_C.split_into(self.plan, len(sizes) - 1 - self.rank, on_cpu(full), shard)",
        "parity/test_table.py::test_two_ranks_equal_one[tp-forward]",
    ),
    Mutation(
        "a partial sum that every rank gets in full",
        "distributed/gather.py",
        "if partial and mesh.ranks_along(partial)[0] != mesh.group_rank:",
        "if partial and mesh.group_rank < 0:",
        "parity/test_selection.py::test_a_part_of_a_sum",
    ),
    Mutation(
        "a gather whose gradient is not multiplied by dp",
        "distributed/gather.py",
        "return (shard * scale if scale > 1 else shard), None",
        "return shard, None",
        "parity/test_table.py::test_two_ranks_equal_one[ddp-forward]",
    ),
    Mutation(
        "a scatter whose gradient is not divided by dp",
        "distributed/gather.py",
        "return (full / spec.grad_scale if spec.grad_scale > 1 else full), None",
        "return full, None",
        "parity/test_table.py::test_two_ranks_equal_one[ddp-forward]",
    ),
    Mutation(
        "an edit of a shared tensor whose gradient is the sum over dp, not the mean",
        "distributed/gather.py",
        'return communicator.all_reduce_sum(("dp",), tensor) / communicator.mesh.dp_size',
        'return communicator.all_reduce_sum(("dp",), tensor)',
        "parity/test_batches.py::"
        "test_an_edit_of_what_all_rows_share_has_the_mean_of_the_ranks_gradients",
    ),
    Mutation(
        "key-value heads that neighbouring ranks share, taken in turn",
        "distributed/placement.py",
        "place // self.stride % self.pieces",
        "place % self.pieces",
        "engine/test_gather_plan.py",
    ),
    Mutation(
        "the axes of a dim that both split, in the wrong order",
        "distributed/placement.py",
        'order = ("tp", "dp") if self.tp_first else ("dp", "tp")',
        'order = ("dp", "tp") if self.tp_first else ("tp", "dp")',
        "engine/test_gather_plan.py",
    ),
    Mutation(
        "interleaved parts that are laid out as one",
        "distributed/placement.py",
        "full_start = full_starts[part] + before[part][own] + low - part_start",
        "full_start = full_starts[part] + before[0][own] + low - part_start",
        "engine/test_gather_plan.py",
    ),
    Mutation(
        "a selected part that is not put back",
        "distributed/picked.py",
        "return into.index_copy(dim, at, part)",
        "return into",
        "parity/test_selection.py::test_one_process",
    ),
    Mutation(
        "padding that stays in what the model continues with",
        "distributed/padding.py",
        "for dim, size in enumerate(self.shape):",
        "for dim, size in enumerate(self.padded):",
        "parity/test_ragged_batches.py::test_global_batches_equal_the_padded_batch[forward-dp]",
    ),
    # Headers.
    Mutation(
        "headers that are alike whatever their site",
        "distributed/header.py",
        "if row[:24] != local[:24] or row[32:] != local[32:]:",
        "if row[:16] != local[:16] or row[32:] != local[32:]:",
        "test_errors.py::test_hooks_that_run_in_another_order_are_an_error",
    ),
    Mutation(
        "bytes that are taken for a header",
        "distributed/header.py",
        "if first != _MAGIC:",
        "if first < 0:",
        "faults/test_byte_parsers.py",
    ),
    Mutation(
        "dtypes that are not compared",
        "distributed/communicator.py",
        "if other.dtype != header.dtype:",
        "if header.dtype is None:",
        "faults/test_tensor_mismatches.py::test_tensors_that_do_not_fit_are_an_error_on_every_rank",
    ),
    Mutation(
        "edits that may change their tensor on one rank only",
        "distributed/communicator.py",
        "if any(bool(other.flags & Header.EDITED) != bool(edited) for other in headers):",
        "if False:",
        "faults/test_tensor_mismatches.py::"
        "test_an_edit_that_changes_its_tensor_on_one_rank_only_is_an_error",
    ),
    # Layouts.
    Mutation(
        "a rule that keeps a dim which must be whole",
        "layouts/propagation/labels.py",
        "if label is None or not all(_is_split_alike(i, label, shard, sizes) for i in reads):",
        "if not all(_is_split_alike(i, label, shard, sizes) for i in reads):",
        "layouts/test_rules.py",
    ),
    Mutation(
        "a bias that every rank adds to its partial sum",
        "layouts/propagation/labels.py",
        "elif len(sums) != 1 or sums[0] in term.other:",
        "elif len(sums) > 1:",
        "layouts/test_rules.py",
    ),
    Mutation(
        "a matrix product whose dims are swapped",
        "layouts/propagation/text_rules.py",
        '"mm": "self:ij mat2:jk -> ik = self*mat2",',
        '"mm": "self:ij mat2:jk -> ki = self*mat2",',
        "layouts/test_rules.py",
    ),
    Mutation(
        "a gather of the model's own that leaves its result split",
        "layouts/contracts/collectives.py",
        "if base in _ALL_REDUCE | _BROADCAST | _ALL_GATHER | _ALL_GATHER_LISTS:\n"
        "        return REPLICATED",
        "if base in _ALL_REDUCE | _BROADCAST | _ALL_GATHER | _ALL_GATHER_LISTS:\n"
        "        return placement",
        "layouts/test_collectives.py::test_what_all_ranks_have_alike",
    ),
    Mutation(
        "the gradient of a replicated tensor that is whole, though split ones were made of it",
        "layouts/gradient_placements.py",
        "isinstance(self._own(made), (Shard, Partial)) and kind is not None else kind",
        "isinstance(self._own(made), Partial) and kind is not None else kind",
        "layouts/test_gradients.py::test_gradients_at_every_module",
    ),
    Mutation(
        "a statement that a proof contradicts, and that counts",
        "layouts/resolve.py",
        "if proven is not None and proven != stated:",
        "if proven is None and stated is None:",
        "layouts/test_resolve.py",
    ),
    Mutation(
        "values that do not refute that a tensor is replicated",
        "layouts/resolve.py",
        "return [axis for axis in axes if not prints.equal_along(axis)]",
        "return []",
        "layouts/test_resolve.py",
    ),
    # Edits.
    Mutation(
        "an edit in place that is lost",
        "hooks/user_function.py",
        "return full if is_kept or full._version != version else None",
        "return None",
        "hooks/test_hooks.py",
    ),
    Mutation(
        "random edits that draw the same in each call",
        "hooks/random_state.py",
        'f"{run_seed} {site} {call}"',
        'f"{run_seed} {site}"',
        "hooks/test_random.py",
    ),
    Mutation(
        "each rank's own random numbers in an edit",
        "distributed/header.py",
        'return int.from_bytes(rows[0][24:32], "little")',
        'return int.from_bytes(local[24:32], "little")',
        "hooks/test_random.py::test_ranks_with_other_seeds_draw_what_rank_0_draws",
    ),
    Mutation(
        "a recomputed edit that adds to save_ctx once more",
        "hooks/user_function.py",
        "save_ctx = copy_for_replay(save_ctx)",
        "save_ctx = Namespace(**vars(save_ctx))",
        "runs/test_runs.py",
    ),
    Mutation(
        "a gradient that is not averaged over dp",
        "hooks/hook_executor.py",
        "mean = mean_over_dp(dtensor.to_local(grad), self._communicator, check)",
        'mean = self._communicator.all_reduce_sum(("dp",), dtensor.to_local(grad))',
        "parity/test_table.py::test_two_ranks_equal_one[dp-parameter]",
    ),
    # Records.
    Mutation(
        "a record that shares the model's memory",
        "records/records.py",
        "return memory.copy(tensor)",
        "return tensor.detach()",
        "parity/test_table.py::test_two_ranks_equal_one[tp-full_backward]",
    ),
    Mutation(
        "the last record of a run, which is lost",
        "records/records.py",
        "for (record, _), full in zip(split, fulls or []):",
        "for (record, _), full in zip(split[:-1], fulls or []):",
        "hooks/test_hooks.py",
    ),
    # Parameters and pipelines.
    Mutation(
        "micro-batches that are joined in the wrong order",
        "pipelining/microbatches.py",
        "for rank in range(len(rows)) for piece in pieces], dim)",
        "for rank in range(len(rows)) for piece in pieces[::-1]], dim)",
        "pipelining/test_pipelining.py::test_a_step_gives_what_the_unsplit_model_gives[ScheduleGPipe]",
    ),
    Mutation(
        "a pipeline's gradients that are those of the sum over micro-batches",
        "pipelining/gradients.py",
        "parameter.grad.div_(self._divisor)",
        "parameter.grad.div_(1)",
        "pipelining/test_pipelining.py::test_a_step_gives_what_the_unsplit_model_gives[ScheduleGPipe]",
    ),
]


def run_tests(tree: Path, tests: str) -> int:
    paths = [f"tests/{test}" for test in tests.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *paths]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    with (tree / "output.txt").open("w") as output:
        return subprocess.run(
            command, cwd=tree, env=environment, stdout=output, stderr=output, timeout=TIMEOUT_S
        ).returncode


def survives(tree: Path, mutation: Mutation) -> bool:
    """Whether the tests pass with the mutation; anything but a failed test is an error."""
    path = tree / "flex_model" / mutation.file
    before = path.read_text()
    assert before.count(mutation.old) == 1, mutation
    path.write_text(before.replace(mutation.old, mutation.new))
    try:
        status = run_tests(tree, mutation.tests)
    finally:
        path.write_text(before)
    if status not in (0, FAILED):
        sys.exit(f"{mutation.name}: pytest gave {status}\n{(tree / 'output.txt').read_text()}")
    return status == 0


def main(words: list[str]) -> int:
    chosen = [
        one
        for one in MUTATIONS
        if not words or any(word in f"{one.name} {one.file}" for word in words)
    ]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=NOT_COPIED)
        if run_tests(tree, " ".join(dict.fromkeys(one.tests for one in chosen))):
            sys.exit(f"without a mutation:\n{(tree / 'output.txt').read_text()}")
        surviving = []
        for one in chosen:
            start = time.monotonic()
            if survives(tree, one):
                surviving.append(one)
            result = "SURVIVES" if one in surviving else "fails"
            print(
                f"{result:8} {time.monotonic() - start:4.0f} s  {one.file}: {one.name}", flush=True
            )
    print(f"{len(chosen) - len(surviving)} of {len(chosen)} mutations fail")
    return bool(surviving)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
