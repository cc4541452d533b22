"""The cells of one framework and model: hook kinds x sites x what the hook does.

A cell is right where what the hook saw, the model's output and all parameter gradients equal those
of the unsharded model under torch's own hooks in the same run. A HookError or ValueError raised on
every rank is an "error"; everything else is "wrong".
"""

import re
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn

import models
from flex_model import FlexModel, HookError, HookFunction, Select
from frameworks import Pair, num_ranks, quiet, rank
from oracle import EDITS, KINDS, Hook, apply, register, torch_hook

TIMEOUT_S = 20
PATTERN = "attention_pattern"  # a child of attention layers
OF = "of_"  # a child for the rows of some experts begins so, with their numbers


class Cell(Hook):
    """One hook."""

    @property
    def record(self) -> str:
        return f"{self.site}#{self.leaf}"

    def __str__(self):
        leaf = f", tensor {self.leaf}" if self.leaf else ""
        return f"{self.kind} on {self.site!r}{leaf}, {self.doing}"


@dataclass
class Outcome:
    """How a cell went: "right", "error" or "wrong", and what was told or what differs."""

    cell: Cell
    result: str
    text: str = ""


@dataclass
class Run:
    """All that must be equal."""

    output: torch.Tensor | None = None
    records: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


# ---- The unsharded run, under torch's own hooks --------------------------------------------------


def precise_run(pair: Pair, cells: list[Cell]) -> Run | None:
    """The oracle's run in float32, for the same loss."""
    if pair.precise is None:
        return None
    return oracle_run(replace(pair, oracle=pair.precise), cells, random_targets(pair).float())


def oracle_run(pair: Pair, cells: list[Cell], targets: torch.Tensor | None = None) -> Run:
    run = Run()
    targets = random_targets(pair) if targets is None else targets
    pair.oracle.zero_grad()
    with ExitStack() as stack:
        for cell in cells:
            seen = run.records.setdefault(cell.record, [])
            stack.enter_context(oracle_hook(pair, cell, seen))
        if not pair.backward:
            with torch.inference_mode():
                run.output = pair.forward(pair.oracle, pair.inputs, pair.keywords)
            return run
        run.output = pair.forward(pair.oracle, pair.inputs, pair.keywords)
        ((run.output * targets).sum() / pair.dp).backward()
    run.output = run.output.detach()
    run.gradients = {
        name: parameter.grad
        for name, parameter in pair.oracle.named_parameters()
        if parameter.grad is not None and not pair.has_no_gradient(name)
    }
    return run


def random_targets(pair: Pair) -> torch.Tensor:
    with torch.no_grad():
        output = pair.forward(pair.oracle, pair.inputs, pair.keywords)
    return pair.masked(models.random(*output.shape, seed=8).to(output.dtype))


def oracle_hook(pair: Pair, cell: Cell, seen: list[torch.Tensor]):
    """A hook of the unsharded model, and what it sees."""

    def see(value):
        if not value.is_floating_point():
            return None
        order = pair.turned.get(cell.site)
        value = value.permute(order) if order else value
        call_hook = apply if cell.kind == "parameter" else pair.call_hook
        # A rank's own loss is not divided by the number of ranks.
        scale = pair.dp if pair.has_own_runs and cell.kind.startswith("full_backward") else 1
        record, edited = call_hook(value * scale if scale > 1 else value, cell.edit)
        seen.append(record)
        edited = edited / scale if edited is not None and scale > 1 else edited
        if edited is None or not order:
            return edited
        return edited.permute(torch.tensor(order).argsort().tolist())

    return torch_hook(pair.oracle, cell, see)


def readable(pair: Pair, kind: str) -> list[Cell]:
    """Every site that has something to read: modules that are called and have a float tensor."""
    if kind == "parameter":
        parameters = pair.oracle.named_parameters()
        return [Cell(kind, name) for name, value in parameters if value.requires_grad]
    names = [name for name, _ in pair.oracle.named_modules()]
    if kind in ("forward_pre", "full_backward"):  # only the output of these is a pattern, or rows
        names = [name for name in names if not name.split(".")[-1].startswith((PATTERN, OF))]
    cells = [Cell(kind, name) for name in names]
    more = pair.outputs if kind in ("forward", "full_backward_pre") else pair.inputs_of
    cells += [Cell(kind, name, leaf=leaf) for name, leaves in more.items() for leaf in leaves]
    run = oracle_run(pair, cells)
    return [cell for cell in cells if run.records[cell.record]]


def cells_of(pair: Pair) -> list[list[Cell]]:
    """What is run: all reads of a kind together, then each edit on its own."""
    runs = []
    for kind in KINDS if pair.backward else KINDS[:2]:
        reads = readable(pair, kind)
        runs.append(reads)
        sites = pair.parameters if kind == "parameter" else pair.sites.values()
        read = {cell.site for cell in reads}
        edits = EDITS if pair.mixes_rows else ("elementwise",)
        runs += [[Cell(kind, site, doing)] for site in sites if site in read for doing in edits]
    return runs


# ---- The sharded run -----------------------------------------------------------------------------


class Sharded:
    """The sharded model of a pair, wrapped once; made anew after a run that failed."""

    def __init__(self, pair: Pair):
        self.pair, self.flex = pair, None
        self.of_parameters: FlexModel | None = None  # for the hooks on their gradients
        self.targets = pair.own_output(random_targets(pair))

    def run(self, cells: list[Cell]) -> tuple[list[Outcome], Run | None]:
        """The run, and the cells that could not be registered. Collective.

        The run is None where it failed: then every cell has an outcome, of one text.
        """
        if self.flex is None and self.pair.session is None:
            sizes = dict(self.pair.sizes)
            self.flex = FlexModel(self.pair.shard(), **sizes, timeout=TIMEOUT_S)
            self.pair.state(self.flex)
            if sizes.pop("dp_batch", None) == "local":  # these are of all ranks
                self.of_parameters = FlexModel(self.flex.module, **sizes, timeout=TIMEOUT_S)
        outcomes: list[Outcome] = []
        run, status, text = None, "right", ""
        try:
            run = self._run(cells, outcomes)
        except (HookError, ValueError) as error:
            status, text = "error", one_line(error)
        except Exception as error:
            status, text = "wrong", one_line(error)
        told = exchange((status, text))
        statuses = {status for status, _ in told}
        if statuses == {"right"}:
            return outcomes, run
        for flex in (self.of_parameters, self.flex):
            if flex is not None:
                flex.restore()
        self.of_parameters = self.flex = None
        if statuses != {"error"}:
            text = "; ".join(f"rank {rank}: {s} {t}" for rank, (s, t) in enumerate(told))
            status = "wrong"
        else:
            text = told[0][1]
        named = {outcome.cell for outcome in outcomes}
        return outcomes + [Outcome(cell, status, text) for cell in cells if cell not in named], None

    def _run(self, cells: list[Cell], outcomes: list[Outcome]) -> Run:
        pair, flex, handles = self.pair, self.flex, []

        def register_all(flex):
            for cell in cells:
                on = (cell.kind == "parameter" and self.of_parameters) or flex
                try:
                    handles.append(register(on, cell.kind, hook_function(flex, cell)))
                except ValueError as error:  # local, and the same on every rank
                    outcomes.append(Outcome(cell, "error", one_line(error)))

        if pair.session is not None:
            records: dict[str, list[torch.Tensor]] = {}
            output, gradients = pair.session(register_all, records, self.targets)
            return Run(output, records, gradients)
        flex.zero_grad()
        of_parameters = {} if self.of_parameters is None else self.of_parameters.output_ptr
        of_parameters.clear()
        flex.output_ptr.clear()
        register_all(flex)
        if pair.first:
            flex(*pair.own_inputs(pair.first), **pair.own_keywords())
            flex.output_ptr.clear()
        output = pair.run_sharded(flex, self.targets)
        for handle in handles:
            handle.remove()
        gradients = pair.full_gradients(flex.module) if pair.backward else {}
        return Run(output.detach(), flex.output_ptr | of_parameters, gradients)


def hook_function(flex: FlexModel, cell: Cell) -> HookFunction:
    layer, _, child = cell.site.rpartition(".")
    if child == PATTERN:
        return flex.attention(layer, cell.edit, output_name=cell.record)
    if child.startswith(OF):
        rows = Select(experts=list(map(int, child.removeprefix(OF).split("_"))))
        return HookFunction(layer, None, cell.edit, output_name=cell.record, select=rows)
    return HookFunction(cell.site, None, cell.edit, cell.leaf, output_name=cell.record)


def exchange(value):
    """Every rank's, in the order of ranks. Collective."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: " + " ".join(str(error).split())[:1500]


# ---- All cells of a pair -------------------------------------------------------------------------


def outcomes_of(pair: Pair) -> list[Outcome]:
    """Run every cell; the same list on every rank. Collective."""
    with quiet():
        runs = cells_of(pair)
        oracles = [(oracle_run(pair, cells), precise_run(pair, cells)) for cells in runs]
        sharded = Sharded(pair)
        pair.start()
        outcomes = []
        for cells, (oracle, precise) in zip(runs, oracles):
            outcomes += run_cells(sharded, cells, oracle, precise)
    return merged(outcomes)


def run_cells(
    sharded: Sharded, cells: list[Cell], oracle: Run, precise: Run | None = None
) -> list[Outcome]:
    """Those that are named in an error are left out, and the others run again."""
    left, done = cells, []
    while left:
        outcomes, run = sharded.run(left)
        if run is not None:
            bad = {outcome.cell for outcome in outcomes}
            left = [cell for cell in left if cell not in bad]
            return done + outcomes + compare(sharded.pair, left, oracle, run, precise)
        if len(left) == 1:
            return done + outcomes
        named = named_in(outcomes[-1].text, left)
        if not named:
            for cell in left:
                done += run_cells(sharded, [cell], oracle, precise)
            return done
        done += [outcome for outcome in outcomes if outcome.cell in named]
        left = [cell for cell in left if cell not in named]
    return done


def named_in(text: str, cells: list[Cell]) -> list[Cell]:
    found = {
        (site, int(leaf or 0))
        for site, leaf in re.findall(r" hook on '([^']*)'(?:, tensor (\d+))?", text)
    }
    return [cell for cell in cells if (cell.site, cell.leaf) in found]


def compare(
    pair: Pair, cells: list[Cell], oracle: Run, run: Run, precise: Run | None = None
) -> list[Outcome]:
    """Records are each cell's own; output and gradients belong to all cells of the run. Local."""
    exact = oracle if precise is None else precise
    own = rounding(oracle, exact)
    common = list(differences("output", run.output, pair.own_output(oracle.output), pair, own))
    for name in oracle.gradients.keys() | run.gradients.keys():
        expected, got = oracle.gradients.get(name), run.gradients.get(name)
        common += differences(f"gradient of {name}", got, expected, pair, own)
    outcomes = []
    for cell in cells:
        expected = own_records(pair, cell, oracle.records[cell.record])
        of_exact = own_records(pair, cell, exact.records[cell.record])
        got = run.records.get(cell.record, [])
        wrong = []
        if len(got) != len(expected):
            wrong = [f"{len(got)} records, expected {len(expected)}"]
        for index, (ours, theirs, true) in enumerate(zip(got, expected, of_exact)):
            of_record = share(theirs, true) if theirs is not None else 0
            wrong += differences(f"record {index}", ours, theirs, pair, min(own, of_record))
        wrong += common
        outcomes.append(Outcome(cell, "wrong" if wrong else "right", "; ".join(wrong)[:1500]))
    return outcomes


def own_records(pair: Pair, cell: Cell, records: list) -> list:
    """Those that this rank should have."""
    if not pair.has_own_runs or cell.kind == "parameter":
        return records if rank() == 0 else []
    is_first = rank() % (num_ranks() // pair.dp) == 0  # of the ranks that share its rows
    own = [of_ranks[pair.dp_rank] for of_ranks in records]
    return [record for record in own if record is not None] if is_first else []


def rounding(oracle: Run, exact: Run) -> float:
    """The largest error of the oracle's own rounding, of the largest value of a tensor."""
    pairs = [(oracle.output, exact.output)]
    pairs += [(grad, exact.gradients[name]) for name, grad in oracle.gradients.items()]
    return max(share(rounded, value) for rounded, value in pairs)


def share(rounded: torch.Tensor, value: torch.Tensor) -> float:
    largest = value.abs().max().item() if value.numel() else 0
    return (rounded - value).abs().max().item() / largest if largest else 0.0


def differences(what: str, got, expected, pair: Pair, own: float):
    """Yield a line if they are not equal within the tolerance, taken of the largest value; beside
    a precise run within three times the oracle's own rounding error: bit for bit where a record
    has none.
    """
    if got is None or expected is None:
        if got is not expected:
            yield f"{what}: got {shape_of(got)}, expected {shape_of(expected)}"
        return
    if type(got) not in (torch.Tensor, nn.Parameter) or got.dtype != expected.dtype:
        yield f"{what}: a {type(got).__name__} of {got.dtype}, expected {expected.dtype}"
    elif got.shape != expected.shape:
        yield f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    elif got.numel():
        difference = (got - expected).abs()
        largest = expected.abs().max().item()
        bound = pair.tolerance * max(1.0, largest) if pair.precise is None else 3 * own * largest
        if not difference.max().item() <= bound:
            at = tuple((difference == difference.max()).nonzero()[0].tolist())
            part = (difference > bound).double().mean()
            ratio = (got.norm() / expected.norm()).item()
            yield (
                f"{what}: at {at} got {got[at].item():.6g}, expected {expected[at].item():.6g} "
                f"({part:.0%} of {tuple(got.shape)} differ; norm x {ratio:.4g})"
            )


def shape_of(value):
    return None if value is None else tuple(value.shape)


def merged(outcomes: list[Outcome]) -> list[Outcome]:
    """A cell is wrong where it is wrong on any rank. Collective."""
    result = []
    for per_rank in zip(*exchange(outcomes)):
        worst = next((o for o in per_rank if o.result == "wrong"), per_rank[0])
        if worst.result == "wrong":
            ranks = [rank for rank, o in enumerate(per_rank) if o.result == "wrong"]
            worst = replace(worst, text=f"[ranks {ranks}] {worst.text}")
        result.append(worst)
    return result
