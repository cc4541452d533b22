"""Unpack and repack a module's output: ours against ``torch.utils._pytree`` and optree.

    python benchmarks/bench_pytree.py [--repeats N] [--calls N] [--json FILE]

Each row is one case: a tree, and a way to take it apart and put it together. In each repeat every
case is timed once, so that noise of the machine falls on all alike. The results are compared with
the tree, leaf by leaf, in the same run.

Columns:
    tree       ``tuple``: ``(t, {"a": t, "b": [t, t, t]}, None)``, 5 leaves; ``tensor``: just one;
               ``output``: a Hugging Face BaseModelOutput with 3, if transformers is installed
    case       ``ours``: pytree.flatten + unflatten; ``ours, one leaf``: leaf_at + replace_leaf of
               the last leaf (what a hook pays); ``torch``: torch.utils._pytree's tree_flatten +
               tree_unflatten; ``optree``: the same of optree, if it is installed (it does not open
               ``output``)
    min_us     the fastest repeat, microseconds per round trip
    median_us  the median of the repeats
    ratio      this case / ``torch`` of the same tree, the median over the repeats; the goal for
               ``ours`` on ``tuple`` is at most 0.2
    wrong      leaves and constants that are not the ones of the tree: 0
"""

import argparse
import json
import statistics
import timeit

import torch
import torch.utils._pytree as torch_pytree

from flex_model import pytree

try:
    import optree
except ImportError:
    optree = None
try:
    from transformers.modeling_outputs import BaseModelOutput
except ImportError:
    BaseModelOutput = None


def make_trees():
    leaves = [torch.full((2,), float(i)) for i in range(5)]
    trees = {"tensor": leaves[0]}
    trees["tuple"] = (leaves[0], {"a": leaves[1], "b": leaves[2:]}, None)
    if BaseModelOutput is not None:
        hidden = tuple(leaves[1:3])
        trees["output"] = BaseModelOutput(last_hidden_state=leaves[0], hidden_states=hidden)
    return trees


def make_cases(tree):
    last = pytree.num_leaves(tree) - 1

    def ours():
        leaves, spec = pytree.flatten(tree)
        return pytree.unflatten(leaves, spec)

    def ours_one_leaf():
        return pytree.replace_leaf(tree, last, pytree.leaf_at(tree, last))

    def theirs():
        leaves, spec = torch_pytree.tree_flatten(tree)
        return torch_pytree.tree_unflatten(leaves, spec)

    def theirs_optree():
        leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
        return optree.tree_unflatten(spec, leaves)

    cases = {"torch": theirs, "ours": ours, "ours, one leaf": ours_one_leaf}
    if optree is not None and not isinstance(tree, dict):
        cases["optree"] = theirs_optree
    return cases


def count_wrong(tree, built):
    """How many places differ: leaves and constants by identity, containers by type."""
    before, spec = torch_pytree.tree_flatten(tree)
    after, built_spec = torch_pytree.tree_flatten(built)
    if spec != built_spec:
        return max(len(before), 1)
    return sum(x is not y for x, y in zip(before, after, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--calls", type=int, default=5000, help="round trips in a repeat")
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    options = parser.parse_args()

    trees = make_trees()
    cases = {(name, case): run for name in trees for case, run in make_cases(trees[name]).items()}
    times = {key: [] for key in cases}
    for _ in range(options.repeats):
        for key, run in cases.items():
            times[key].append(timeit.timeit(run, number=options.calls) / options.calls * 1e6)

    rows = []
    for (name, case), run in cases.items():
        taken = times[name, case]
        ratios = [x / y for x, y in zip(taken, times[name, "torch"], strict=True)]
        row = {
            "tree": name,
            "case": case,
            "min_us": round(min(taken), 3),
            "median_us": round(statistics.median(taken), 3),
            "ratio": round(statistics.median(ratios), 4),
            "wrong": count_wrong(trees[name], run()),
        }
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        rows.append(row)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    if any(row["wrong"] for row in rows):
        raise SystemExit("a result differs from the tree")


if __name__ == "__main__":
    main()
