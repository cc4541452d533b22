"""A second core of hooks beside the user's, and a run with it alone: `verify` compares two such
runs, a fingerprint is of one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flex_model import pytree
from flex_model.distributed.agreement import gather_checked
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Shape, ShardLayout
from flex_model.errors import is_agreed
from flex_model.hooks.core import HookCore
from flex_model.hooks.function import HookFunction, name_of
from flex_model.hooks.registration import Registration
from flex_model.hooks.table import EVERYTHING
from flex_model.hooks.user_function import on_copy
from flex_model.inspection import text
from flex_model.inspection.shapes_only import same_torch_random_state
from flex_model.inspection.tree import named
from flex_model.integrations import dtensor, expert_units, fsdp2, transformers_private
from flex_model.integrations.made_sites import MadeSites
from flex_model.integrations.torch_private import accumulation_hooks
from flex_model.names import clean, find_module
from flex_model.runs.graphs import leaves_between

Loss = Callable[[Any], Tensor]
Reference = nn.Module | Callable[[], nn.Module] | None
Found = dict[str, list[Tensor]]  # by the index of the site


@dataclass(frozen=True)
class Site(text.SiteRow):
    """A compared tensor; of kind ``"gradient"``, the gradient of a trainable module's parameter.

    Attributes:
        hook: What a twin is made of: the user's hook that edits there, or one that only reads. None
            for a gradient, and for a further tensor of the previous site's hook.
    """

    hook: HookFunction | None


def sites_to_compare(core: HookCore, with_loss: bool) -> list[Site]:
    """Return the sites of the registered hooks; without hooks, the outputs of all modules."""
    found: dict[tuple[str, str, int | str], Site] = {}
    registrations = [r for r in core.table.registrations if r.kind != "tensor"]
    for r in registrations:
        if r.is_backward and not with_loss:
            continue
        function = r.hook_function
        place = r.name, r.kind, function.unpack_idx
        index, stated = function.unpack_idx, function.placements
        hook = HookFunction(r.name, function.expected_shape, None, index, placements=stated)
        found.setdefault(place, Site(*place, hook))
    if not registrations:
        names = named(core.module)
        found = {(n, "forward", 0): Site(n, "forward", 0, HookFunction(n)) for n in names}
    if not found:
        raise ValueError(
            "verify: only backward hooks are registered; give loss=, a function of the model's "
            "output"
        )
    return list(found.values())


def sites_to_edit(core: HookCore, with_loss: bool) -> list[Site]:
    """Return the sites of the registered hooks in order, then the model's output and, with a loss,
    the gradients of trainable modules.
    """
    found: list[Site] = []
    given = None
    for r in core.table.registrations:
        if r.kind != "tensor" and (with_loss or not r.is_backward):
            hook = None if r.given is given else r.given
            given = r.given
            found.append(Site(r.name, r.kind, r.hook_function.unpack_idx, hook))
    found.append(Site("", "forward", 0, HookFunction("")))
    if with_loss:
        names = [name for name, value in core.modules.named_parameters() if value.requires_grad]
        found += [Site(name, "gradient", 0, None) for name in names]
    return found


def full_inputs(core: HookCore, args: Any, kwargs: Any) -> Any:
    """Return the inputs of the whole batch, on rank 0. Collective."""
    communicator = core.communicator
    leaves, spec = pytree.flatten((args, kwargs))
    states = any(map(dtensor.is_dtensor, leaves)) or core.tracking.statements.of_inputs(
        "", core.module
    )
    if core.mesh.dp_size == 1 and not states:
        return args, kwargs  # the run compares those of tensor-parallel ranks
    follower = core.tracking.follower()
    core.tracking.seed(follower, args, kwargs)
    values = [follower.recorder.value(leaf) for leaf in leaves]
    follower.sync(communicator)
    for i, leaf in enumerate(leaves):
        dp, tp = follower.placements(values[i])
        shard = dtensor.to_local(leaf.detach())
        row = torch.tensor(shard.shape, dtype=torch.int64, device="cpu")
        shapes: list[Shape] = [tuple(shape) for shape in communicator.exchange(row).tolist()]
        if dp is None or tp is None:
            problem = "is not the same on all tensor-parallel ranks"
            if tp is not None:
                problem = "is neither proven to be rows of one batch nor equal on all ranks"
            raise ValueError(
                f"verify: input tensor of shape {tuple(leaf.shape)} {problem} (shapes by rank "
                f"{shapes}); give every data-parallel rank its own rows, unsharded along tp"
            )
        gather_spec = TensorSpec.of(communicator, ShardLayout(dp, tp), shapes, leaf.dtype)
        full = gather_spec.gather_to_first(shard)
        if full is not None:
            leaves[i] = full.requires_grad_(leaf.requires_grad)
    return pytree.unflatten(leaves, spec)


def _twin(hook: HookFunction, number: int) -> HookFunction:
    """Return a copy of a hook with the same edits, which records under this index and the following
    ones. The editing function gets the user's hook.
    """
    twin = copy.copy(hook)
    twin.output_name, twin.record, twin._registrations = str(number), True, ()
    twin.members = tuple(_twin(member, number + i) for i, member in enumerate(hook.members))
    function = hook.editing_function
    if function is None:
        return twin

    def edit(module: Any, full: Tensor, save_ctx: Namespace, modules: Any) -> Tensor | None:
        own, parameters = (hook.save_ctx, hook.modules), hook.parameters
        hook.attach(hook._registrations, save_ctx, modules)
        hook.pass_parameters(twin.parameters)
        try:
            return function(module, full, save_ctx, modules)
        finally:
            hook.attach(hook._registrations, *own)
            hook.pass_parameters(parameters)

    twin.editing_function = functools.update_wrapper(edit, function, updated=())
    return twin


class SecondCore(HookCore):
    """A second HookCore besides the user's, on the same model or on the reference: one whose hooks
    only read, and that continues where a layout can't be resolved, or one that edits as the user's
    does, with its ``save_ctx`` and copies of its trainable modules. What the user states of the
    wrapped model holds there.

    Args:
        reference: A model that this process alone runs, in place of the wrapped one.

    Attributes:
        unresolved: By index, the errors of registrations whose layout could not be resolved; the
            same on every rank.
    """

    def __init__(
        self,
        user: HookCore,
        edits: bool = False,
        edit_on: str = "all",
        reference: nn.Module | None = None,
    ) -> None:
        self.found: Found = {}
        self.unresolved: dict[int, Exception] = {}
        save_ctx, modules = Namespace(), nn.ModuleDict()
        if edits:
            save_ctx, modules = user.save_ctx, copy.deepcopy(user.modules)
            modules.zero_grad()
            edit_on = "all" if user.executor.edits_on_all else "rank0"
        settings = replace(
            user.settings,
            edit_on=edit_on,
            output_ranks="rank0",
            save_ctx_on="rank0",
            follow="new",
            dp_batch=None,
            pad_value=0,
        )
        super().__init__(
            user.module if reference is None else reference,
            user.mesh if reference is None else Mesh(),
            self.found,
            save_ctx,
            modules,
            settings,
            on_failure=None if edits else self._leave_out,
            only_whole=True,  # the report lists modules that were not called
        )
        for statement in user.tracking.statements if reference is None else ():
            self.tracking.state(statement)

    def watch(self, site: Site, number: int) -> bool:
        """Hook a site, recorded under its index; False if the model has no such module."""
        if site.kind == "gradient":
            return True
        try:
            module = find_module(self.module, site.name)
        except ValueError:
            return False
        if site.hook is not None:
            twin = _twin(site.hook, number)
            targets = expert_units.rows_of_experts(twin, site.kind, [module])
            self.register(twin, site.kind, targets)
        return True

    def make_sites(self, like: nn.Module) -> None:
        """Make the modules in this model that flex_model has made in another one, as long as this
        core lives: patterns of attention, choices and units of experts.
        """
        for name, made in named(like).items():
            if isinstance(made, MadeSites):
                parent = name.rpartition(".")[0]
                with contextlib.suppress(ValueError):  # then it is not in the reference
                    end = made.install_in(find_module(self.module, parent), parent)
                    self.on_close.callback(end)

    def take_gradients(self, sites: Sequence[Site]) -> None:
        """Record the gradients of the trainable modules after a run."""
        gradients = {name: parameter.grad for name, parameter in self.modules.named_parameters()}
        for i, site in enumerate(sites):
            gradient = gradients[site.name] if site.kind == "gradient" else None
            if gradient is not None:
                self.found[str(i)] = [gradient.cpu()]

    def _leave_out(self, registration: Registration, error: Exception) -> None:
        """Leave out a site without a tensor, whose tensor can't be gathered, or whose layout is not
        known.
        """
        if is_agreed(error) and not isinstance(error, ValueError):
            raise error
        self.unresolved[registration.index] = error
        cause: BaseException | None = error
        while cause is not None:  # the frames of a traceback hold the tensors of the forward
            cause = cause.with_traceback(None).__cause__ or cause.__context__


# ---- The two runs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class TwoRuns:
    """The runs of the unsharded and of the wrapped model on the same sites.

    Attributes:
        edits: Whether both models are edited as by the user's hooks.
    """

    core: HookCore
    sites: Sequence[Site]
    loss: Loss | None
    edits: bool

    def of_reference(self, reference: Reference, inputs: Any) -> tuple[Found, list[bool]]:
        """Run the unsharded model on this process alone; return its tensors, and whether it has
        each site.
        """
        module: Any = reference
        if not isinstance(module, nn.Module) and callable(module):
            module = module()
        if not isinstance(module, nn.Module):
            raise TypeError(
                "verify: rank 0 needs the unsharded model, or a function that makes it, got "
                f"{type(module).__name__}"
            )
        if any(part is self.core.module for part in module.modules()):
            raise ValueError(
                "verify: the reference is the wrapped model itself; give an unsharded one with the "
                "same weights, loaded or copied before sharding"
            )
        parameter = next(module.parameters(), None)
        with self._restored_state():
            second = SecondCore(self.core, self.edits, reference=module)
            if parameter is not None:
                second.modules.to(parameter.device)
            second.make_sites(self.core.module)
            has_site = self._run(second, range(len(self.sites)), detached(inputs, parameter))
        return second.found, has_site

    def of_shards(self, watched: Sequence[int], inputs: Any) -> tuple[Found, dict[int, Exception]]:
        """Run the wrapped model without the user's hooks; return rank 0's full tensors, and by
        index the errors of sites whose layouts were not resolved. Collective.
        """
        with self.core.table.nothing_chosen(), self._restored_state():
            second = SecondCore(self.core, self.edits)
            self._run(second, watched, detached(inputs, None))
        return second.found, {watched[i]: error for i, error in second.unresolved.items()}

    def _run(self, second: SecondCore, watched: Sequence[int], inputs: Any) -> list[bool]:
        """Run a core once on some of the sites, and close it; return whether it has each."""
        try:
            has_site = [second.watch(self.sites[i], i) for i in watched]
            for i, has in zip(watched, has_site):
                hook = self.sites[i].hook
                if hook is not None and hook.editing_function is not None and not has:
                    raise ValueError(
                        f"verify: the reference has no module {self.sites[i].name!r} for the edit "
                        "there; give a model that has it, or remove the hook"
                    )
            run_once(second, inputs, self.loss, partial(second.take_gradients, self.sites))
        finally:
            second.close()
        return has_site

    @contextlib.contextmanager
    def _restored_state(self) -> Iterator[None]:
        """Restore ``save_ctx`` and the global random generators afterwards."""
        if not self.edits:
            yield
            return
        numpy_random = sys.modules.get("numpy.random")
        python_state = random.getstate()
        numpy_state = numpy_random.get_state() if numpy_random else None
        with same_torch_random_state(), on_copy(self.core.save_ctx):
            try:
                yield
            finally:
                random.setstate(python_state)
                if numpy_random:
                    numpy_random.set_state(numpy_state)


def run_once(
    core: HookCore, inputs: Any, loss: Loss | None, after: Callable[[], None] | None = None
) -> None:
    """Run a forward, and a backward if there is a loss, and ``after`` it; restore the parameters'
    gradients.
    """
    args, kwargs = inputs
    gradients = contextlib.nullcontext() if loss is not None else torch.no_grad()
    with gradients, core.runs.active(EVERYTHING):
        output = core.module(*args, **kwargs)
    if loss is None:
        return
    module: Any
    for module in core.module.modules():
        if fsdp2.is_fsdp2(module):
            module.reshard()  # the root stays unsharded after a forward
    values: list[Any] = []  # a loss that fails on one rank: the others would wait in the backward
    gather_checked(core.communicator, "the loss", lambda: values.append(loss(output)))
    (value,) = values
    with no_gradients_kept([*core.module.parameters(), *leaves_between([], value)]):
        value.backward()
        if after is not None:
            after()


def check_backward(core: HookCore, what: str) -> None:
    """ValueError, on every rank, where a backward besides the user's would change more than the
    ``.grad`` that is restored after it. Collective.
    """

    def check() -> None:
        if fsdp2.accumulates(core.module):
            raise ValueError(
                f"{what}: its backward would be added to gradients that FSDP keeps between "
                "micro-batches until they are reduced (set_requires_gradient_sync(False), "
                "no_sync()), and which can't be restored; call it before the first micro-batch, "
                "or after the backward of the last one, which reduces them"
            )
        names = [clean(core.module, name) for name, _ in core.module.named_parameters()]
        for name, parameter in [
            *zip(names, fsdp2.kept_parameters(core.module), strict=True),
            *core.modules.named_parameters(),
        ]:
            for hook in accumulation_hooks(parameter):
                if not transformers_private.sums_gradient(hook):
                    raise ValueError(
                        f"{what}: its backward would call {name_of(hook)}, a hook of "
                        f"register_post_accumulate_grad_hook on {name!r}, which may change the "
                        "weights (an optimizer's step); remove it by its handle, and register it "
                        "again afterwards"
                    )

    with core.table.nothing_chosen():  # its own hooks on gradients are not among those
        gather_checked(core.communicator, what, check)


@contextlib.contextmanager
def no_gradients_kept(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Set the parameters' gradients to None inside, and restore them afterwards."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def detached(inputs: Any, like: Tensor | None) -> Any:
    """Return a copy of the inputs for one run, on the device of ``like``, apart from the caller's
    tensors: the run may change its inputs in place, and add to a cache.
    """

    def twin_of(tensor: Tensor) -> Tensor:
        device = tensor.device if like is None else like.device
        return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)

    return pytree.copied(inputs, twin_of)
