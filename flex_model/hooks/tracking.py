"""Decides which forwards are followed, and collects evidence of the layouts of hooks' tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flex_model import _C
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import Header, site_hash, sites_hash
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.padding import RankRows
from flex_model.distributed.placement import Partial, Placement, Replicate
from flex_model.errors import agreed
from flex_model.hooks.evidence import Evidence, Forward, Part
from flex_model.hooks.registration import Registration
from flex_model.hooks.table import ActiveHooks
from flex_model.integrations import (
    compiled,
    dtensor,
    fsdp2,
    mesh_sources,
    past_positions,
    transformers_private,
)
from flex_model.layouts import follow
from flex_model.layouts.cache import Conditions, ForwardLayouts, LayoutCache, Place
from flex_model.layouts.follow import UNKNOWN, Follower, Pair
from flex_model.layouts.inputs import SharedInputs, seed_inputs
from flex_model.layouts.kept import Attributes, KeptTensors
from flex_model.layouts.mesh_proofs import MeshProofs
from flex_model.layouts.module_buffers import Buffers
from flex_model.layouts.placement_encoding import common, encode
from flex_model.layouts.replicas import PendingReplica
from flex_model.layouts.sources import (
    Argument,
    BatchDim,
    Constants,
    Weights,
    check_without_tensors,
    named_inputs,
    stated_by_dtensor,
    states_of,
    tensors_of,
)
from flex_model.layouts.statements import Statement, Statements

_MOST_GRAPHS = 4
Follow = Literal["new", "always"]


class Tracking:
    """The layout inference of one FlexModel. ``begin`` and ``end`` enclose each forward of the
    wrapped module.

    Attributes:
        forward: The running forward; swapped with another batch's in sequential runs.
        statements: The layouts that the user states with ``annotate_layout``.
        num_followed: How many forwards were followed so far.
        is_local: Whether nothing needs to be followed: one process holds all tensors.
        has_rows: Whether this rank has rows of the batch; see ``FlexModel.no_rows``.
    """

    def __init__(
        self, root: nn.Module, communicator: Communicator, batch_dim: BatchDim, follow: Follow
    ) -> None:
        self._root = root
        self._communicator, self.is_local = communicator, communicator.is_local
        self.batch_dim = batch_dim
        self._follow = follow
        self._memory = LayoutCache()
        self.num_followed = 0
        self._conditions: Conditions | None = None
        self._constants = Constants(root)
        self._buffers = None if communicator.is_local else Buffers(root)
        self._kept = KeptTensors()
        self._attributes = Attributes(root, self._constants, self._kept)
        self.statements = Statements(root)
        self.forward = Forward()
        self.last: MeshProofs | None = None  # of the last forward that was followed
        self._last_values: dict[Place, Any] = {}  # the values of hooks' tensors in it
        # The layouts of the last forwards with gradients: a backward may be of any of them.
        self._recent: deque[ForwardLayouts] = deque(maxlen=_MOST_GRAPHS)
        self.has_rows = True
        self._has_failed = False

    def state(self, statement: Statement) -> None:
        """Add a statement of the user's; forwards are followed anew. Local.

        Raises:
            ValueError: the model states otherwise.
        """
        weights = self._weights(self._communicator.mesh, self._buffers)
        refuted = weights.refuted(statement) if statement.kind == "parameter" else ""
        if refuted:
            raise ValueError(refuted)
        self.statements.append(statement)
        self.forget()

    def note_rows(self, has_rows: bool) -> None:
        """Note whether the next forwards have rows of the batch on this rank. Local."""
        self.has_rows = has_rows

    def forget(self) -> None:
        """Follow forwards anew, after a new statement or a failed run. Local."""
        self._memory.clear()
        self._recent.clear()
        self._conditions = None

    def begin(
        self,
        args: Any,
        kwargs: Any,
        active: ActiveHooks,
        stage: int = 0,
        part: Part | None = None,
        later: list[PendingReplica] | None = None,
    ) -> None:
        """Begin a forward of the wrapped module. Collective over the grid where hooks on its
        activations are active.

        Args:
            stage: Which of the wrapped modules runs, if they are several stages of a pipeline.
            part: What is called, if it is not the wrapped module.
            later: Where its inputs are compared along tp: gets the comparisons of those on GPUs.

        Raises:
            ValueError: ranks along tp were given different inputs. On every rank.
        """
        if self.forward.enter() or self.is_local:
            return
        self.finish()  # a forward of the same run that failed
        parameters = [r for r in active.parameters if self._infers_gradient(r)]
        states = states_of((args, kwargs))
        forward = self.forward = Forward(1, part, states=states, parameters=parameters)
        if not active.registrations:
            return
        if self._conditions is None:
            self._conditions = Conditions(self._root)
        assert self._buffers is not None
        self._buffers.observe()
        counted = 0 if active.pads else past_positions.compared()
        site = sites_hash(stage, part and part.name, active.digest, counted)
        is_shared = later is not None and self._communicator.mesh.tp_size > 1
        inputs = self._inputs_of(args, kwargs)
        kept = tuple((self._kept.pair(one.tensor) if one.is_kept else one.placed) for one in inputs)
        known = sites_hash(site, self._buffers.digest, self.has_rows, kept)
        form, sizes = self._conditions.form(args, kwargs, known, self._attributes)
        numbers = self._memory.key_numbers(form, sizes)
        shared = None
        if later is not None and is_shared:
            shared = SharedInputs(inputs, self._stated_inputs())
            later += shared.pending()
        hashed = None if shared is None else shared.hash()
        header = Header("inputs", site=site, shape=numbers, hash=hashed)
        headers = self._communicator.check_consistency(header, "the start of a forward")
        hashes = [other.hash for other in headers]
        if shared is not None and not self._communicator.mesh.equal_along("tp", hashes):
            shared.compare(self._communicator)
        key, layouts = self._memory.begin(tuple([other.shape for other in headers]))
        if layouts is None or self._follow == "always":
            self.num_followed += 1
            if self._follow == "always":  # its layouts are those of this forward alone
                key = replace(key, forward=site_hash(key.forward, self.num_followed))
            forward.begin(key, None)
            self._begin_to_follow(forward, args, kwargs, active.pads)
            return
        forward.begin(key, layouts)
        if torch.is_grad_enabled():
            self._recent.append(layouts)

    def _infers_gradient(self, registration: Registration) -> bool:
        """Return whether the placement of a parameter's gradient is inferred from operations: along
        tp, a DTensor states it.
        """
        mesh = self._communicator.mesh
        return mesh.dp_size > 1 or any(
            (stated_by_dtensor(parameter, mesh) or (None, None))[1] is None
            for parameter in registration.living_targets
        )

    def _begin_to_follow(self, forward: Forward, args: Any, kwargs: Any, pads: bool) -> None:
        follower = self.follower()
        with follow.paused():  # another FlexModel may be following already
            forward.note_rows(self.seed(follower, args, kwargs, pads))
        with ExitStack() as stack:
            stack.enter_context(compiled.nothing_compiled())
            stack.enter_context(follower)
            forward.follow(follower, stack.pop_all())

    def seed(
        self, follower: Follower, args: Any, kwargs: Any, pads: bool = False
    ) -> RankRows | None:
        """Give the follower the placements of the inputs. Collective; see `seed_inputs`."""
        self._kept.adopt(states_of((args, kwargs)))
        part = self.forward.part
        module = self._root if part is None else part.module
        return seed_inputs(
            follower,
            self._communicator,
            self.batch_dim,
            self._inputs_of(args, kwargs),
            partial(check_without_tensors, self.batch_dim, module, args, kwargs),
            self._stated_inputs(),
            self._kept,
            pads,
            self.has_rows,
        )

    def _inputs_of(self, args: Any, kwargs: Any) -> list[Argument]:
        """Return the inputs of the module that is called. Those of a part of the model may be of a
        part that was called before; those of the model itself are placed by contract, but for what
        it returned.
        """
        part, inputs = self.forward.part, list[Argument]()
        for one in named_inputs(self._root if part is None else part.module, args, kwargs):
            if not one.is_state:
                is_kept = part is not None and self._kept.source(one.tensor) is not None
                dp = self._kept.along_dp(one.tensor, is_made=part is None)
                one = one._replace(is_kept=is_kept, placed=dp)
            inputs.append(one)
        return inputs

    def _stated_inputs(self) -> dict[int, Statement]:
        return self.statements.of_inputs(*(self.forward.part or ("", self._root)))

    def follower(self) -> Follower:
        """Return a follower that has the placements of the model's weights. Local."""
        mesh = self._communicator.mesh
        weights = self._weights(mesh, self._buffers)
        return Follower(self._root, mesh, self.statements, weights, self._kept.source)

    def follower_of_microbatch(self, buffers: Buffers) -> Follower:
        """Return a follower of a micro-batch, of which no data-parallel rank has a part. Local."""
        mesh = self._communicator.mesh.of_own_batch()
        return Follower(self._root, mesh, self.statements, self._weights(mesh, buffers))

    def _weights(self, mesh: Mesh, buffers: Buffers | None) -> Weights:
        return Weights(self._root, mesh, self.statements, self._constants, buffers)

    def end(self, output: Any = None, failed: bool = False) -> None:
        """End the forward that began last. Collective where it was followed and has not failed on
        any rank.
        """
        forward = self.forward
        if not forward.leave() or self.is_local:
            return
        forward.close()
        awaited = [True] if failed else map(dtensor.is_awaited, _C.flatten(output)[0])
        self._communicator.note_output(all(awaited))
        self._has_failed |= failed
        if failed:
            self._note_proofs(forward)
            forward.fail()
        else:
            self.finish(output)
            if forward.layouts is not None:
                self._note_state(forward, forward.layouts, output)
                if self._buffers is not None:
                    self._buffers.note(forward.layouts.buffers)

    def _note_proofs(self, forward: Forward) -> None:
        """Keep the proofs of a followed forward, also of one that a refused site has ended."""
        if forward.follower is not None:
            self.last = forward.follower.proofs
            self._last_values = {place: seen.value for place, (seen, _) in forward.seen.items()}

    def _note_state(self, forward: Forward, layouts: ForwardLayouts, output: Any) -> None:
        """Note the placements of state after a forward that was not followed."""
        left = list(zip(tensors_of([*forward.states, output]), layouts.state))
        attributes = self._attributes.tensors() if layouts.attributes else {}
        for name, pair in layouts.attributes.items():
            if name in attributes:
                left.append((attributes[name], pair))
        self._kept.note_state(left)

    def finish(self, output: Any = None) -> None:
        """Compare and store the results of a followed forward; only compare those of one that has
        failed, for its records. Collective where there was one.
        """
        forward = self.forward
        if forward.follower is None or forward.is_over:
            return
        forward.finish()
        if forward.has_failed:
            self._compare(forward.follower)
            for evidence, _ in forward.seen.values():
                evidence.settle()
            return
        forward.follower.note_outputs(output, forward.part.name if forward.part else "")
        left = [forward.follower.joint_value(one) for one in tensors_of([*forward.states, output])]
        assert self._buffers is not None
        written = {
            name: forward.follower.joint_buffer_value(buffer, is_same)
            for name, buffer, is_same in self._buffers.written(forward.follower.has_written)
        }
        self._attributes.scan()
        attributes = [  # constants until now
            (tensor, forward.follower.joint_value(tensor))
            for tensor in self._attributes.tensors().values()
            if forward.follower.has_written(tensor)
        ]
        self._compare(forward.follower, is_over=True)
        self._note_proofs(forward)
        follower = forward.follower
        of_gradients: dict[Place, Any] = {}
        for place, (evidence, _) in forward.seen.items():
            evidence.settle()
            if evidence.needs_gradient:
                of_gradients[place] = evidence.current
        assert forward.key is not None
        for registration in forward.parameters:
            of_weight = follower.weight_of(registration.living_targets, registration.first_name)
            if of_weight is not None:
                of_gradients[Place(registration.site, 0)] = of_weight
        gradients = self._gradients(follower, of_gradients, forward.parameters)
        for place, (evidence, _) in forward.seen.items():
            # What reads a replica on its way to the loss is known only of one that has a gradient.
            if evidence.is_frozen and evidence.pair[1] == Replicate() and place in gradients:
                gradients[place] = gradients[place][0], None
        obstacles = {
            place: follower.proofs.gradient_obstacles(of_gradients[place])
            for place, pair in gradients.items()
            if None in pair
        }
        for place, (evidence, _) in forward.seen.items():
            if place in gradients:
                evidence.note_gradient(gradients[place], obstacles.get(place, {}))
        self._kept.note(follower, attributes)
        self._kept.note_states([*forward.states, *states_of(output)])
        layouts = ForwardLayouts(
            pairs={place: evidence.pair for place, (evidence, _) in forward.seen.items()},
            gradients=gradients,
            obstacles=obstacles,
            shapes={place: shape for place, (_, shape) in forward.seen.items()},
            state=list(map(follower.placements, left)),
            buffers={name: follower.placements(value) for name, value in written.items()},
            attributes={
                name: self._kept.pair(tensor) for name, tensor in self._attributes.tensors().items()
            },
            comparisons=follower.recorder.comparisons,
            rows=forward.rows,
        )
        if torch.is_grad_enabled():
            self._recent.append(layouts)
        self._buffers.note(layouts.buffers)
        self._memory.remember(forward.key, layouts)
        forward.seen.clear()

    def exchange(self, forward: Forward) -> Forward:
        """Make another batch's forward the running one; return the former."""
        before, self.forward = self.forward, forward
        return before

    def reset(self) -> None:
        """Drop the running forward: a run begins, or has ended in whatever state."""
        if self.forward.depth or not self.is_local:
            self.forward.close()
            self.forward, self._has_failed = Forward(), False

    @property
    def has_failed(self) -> bool:
        """Whether a forward of the run has failed, or has not come to its end."""
        return self._has_failed or self.forward.depth > 0

    @property
    def key(self) -> int | None:
        """The key of the running forward, for evidence of its tensors and of its recomputation."""
        return None if self.forward.key is None else self.forward.key.forward

    @property
    def is_following(self) -> bool:
        """Whether the running forward is followed."""
        return self.forward.follower is not None and not self.forward.is_over

    def number(self, registration: Registration) -> int:
        """Return the number of this call of the hook in the running forward; where one process
        holds all tensors, all calls have the same layout, and are not counted.
        """
        return 0 if self.is_local else self.forward.number(registration.index)

    def evidence(self, registration: Registration, tensor: Tensor, number: int) -> Evidence:
        """Return the evidence of how a hook's tensor is placed. Local.

        Raises:
            HookError: the forward differs from an earlier one with inputs of the same key.
        """
        forward = self.forward
        if forward.key is None or self._communicator.is_local or tensor.is_nested:
            return Evidence()
        place, shape = Place(registration.site, number), registration.shape_of_forward(tensor)
        if forward.follower is None:
            assert forward.layouts is not None
            pair = forward.layouts.check(place, shape, registration.describe)
            layouts = forward.layouts
            known = Evidence(forward.key.forward, pair, rows=forward.rows)
            gradient = layouts.gradients.get(place, UNKNOWN)
            known.note_gradient(gradient, layouts.obstacles.get(place, {}))
            return known
        module = registration.living_module
        evidence = Evidence(
            self.key,
            follower=forward.follower,
            value=forward.follower.joint_value(tensor),
            words=() if module is None else forward.follower.words(module),
            rows=forward.rows,
            # A part that the backward recomputes runs without gradients first.
            needs_gradient=(registration.is_backward or registration.edits)
            and not self._states_gradient(tensor),
            is_frozen=registration.is_backward
            and torch.is_grad_enabled()
            and not tensor.requires_grad,
        )
        forward.seen[place] = evidence, shape
        return evidence

    def _states_gradient(self, tensor: Tensor) -> bool:
        """Return whether a DTensor states the placements of its gradient, too."""
        mesh = self._communicator.mesh
        dp, tp = stated_by_dtensor(tensor, mesh) or (None, None)
        return (dp is not None or mesh.dp_size == 1) and (tp is not None or mesh.tp_size == 1)

    def proof(self, registration: Registration) -> dict[str, list[str]]:
        """Return, by axis, the operations that prove how the hook's tensor is placed, in its first
        call of the forward that was followed last. Local.
        """
        value = self._last_values.get(Place(registration.site, 0))
        if self.last is None or value is None:
            return {}
        found = {axis: self.last.why(value, axis) for axis in self.last.along}
        return {axis: steps for axis, steps in found.items() if steps}

    def evidence_of_replay(
        self, registration: Registration, keys: Iterable[int | None]
    ) -> Evidence:
        """Return the evidence of how a hook's tensor is placed in a recomputed forward, in any of
        the hook's calls: what all calls in the forwards of these keys agree on. Local.
        """
        found = {
            (pair, layouts.gradients.get(place, UNKNOWN))
            for layouts in map(self._memory.of, keys)
            for place, pair in layouts.pairs.items()
            if place.site == registration.site
        }
        key = next(iter(keys), None)
        first = self._memory.of(key)
        pair, gradient = next(iter(found)) if len(found) == 1 else (UNKNOWN, UNKNOWN)
        evidence = Evidence(key, pair, rows=first.rows, is_ambiguous=len(found) > 1)
        why = (why for place, why in first.obstacles.items() if place.site == registration.site)
        evidence.note_gradient(gradient, next(why, {}))
        return evidence

    def prove(self, evidence: Evidence) -> Pair:
        """Return the proven placements of a hook's tensor. Collective where its forward is
        followed.
        """
        if evidence.follower is not None and not self.forward.is_over:
            with follow.paused(evidence.follower):
                self._compare(evidence.follower)
            evidence.note_obstacles()
        return evidence.placements

    def _gradients(
        self, follower: Follower, values: Mapping[Place, Any], parameters: Iterable[Registration]
    ) -> dict[Place, Pair]:
        """Return the gradients' placements that the forward proves. Collective if there are any."""
        pairs = {place: follower.proofs.gradient_placements(one) for place, one in values.items()}
        for registration in parameters:
            place = Place(registration.site, 0)
            if place in pairs and registration.moment == "accumulated":
                pairs[place] = self._sharded_gradient(registration, *pairs[place])
        return dict(zip(pairs, self._agreed(list(pairs.values()))))

    def _sharded_gradient(
        self, registration: Registration, dp: Placement | None, tp: Placement | None
    ) -> Pair:
        """Return the placements of a parameter's gradient once FSDP2 has sharded it: hooks that
        torch called before may have summed the parts of tensor-parallel ranks. Local.
        """
        targets = registration.living_targets if tp == Partial() else ()
        hooks = [one for target in targets for one in fsdp2.earlier_hooks(self._root, target)]
        if hooks:
            is_sum = len(hooks) == 1 and transformers_private.sums_gradient(hooks[0])
            tp = Replicate() if is_sum else None
        return dp, tp

    def _agreed(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Return what all ranks of the grid have proven alike. Collective where there is any."""
        if not pairs:
            return []
        rows = [[site_hash(encode(one)) for one in pair] for pair in pairs]
        header = Header("inputs", site=site_hash("gradients", len(pairs)))
        with self._communicator.uncounted():
            self._communicator.check_consistency(header, f"the layouts of {len(pairs)} gradients")
            table = self._communicator.exchange(torch.tensor(rows, device="cpu")).tolist()
        return [common(pair, [rank[i] for rank in table]) for i, pair in enumerate(pairs)]

    def prove_gradient(self, evidence: Evidence) -> Pair:
        """Return the placements of the gradient of a hook's tensor, in a backward. Collective where
        that runs inside the followed forward.
        """
        if evidence.follower is not None and not self.forward.is_over:
            with follow.paused(evidence.follower):
                self._compare(evidence.follower)
            pair = evidence.follower.proofs.gradient_placements(evidence.current)
            evidence.note_gradient(
                self._agreed([pair])[0],
                evidence.follower.proofs.gradient_obstacles(evidence.current),
            )
        return evidence.gradient

    def why_once(self) -> str:
        """Return why gradients of the model's gradients would be wrong; empty if they are right."""
        return mesh_sources.why_once(self._root)

    def evidence_of_parameter(self, registration: Registration) -> Evidence:
        """Return the evidence of how a parameter's gradient is placed: what the last forwards agree
        on, since which of them a backward is of is not known. Local.
        """
        place, obstacles = Place(registration.site, 0), dict[str, str]()
        found = {one.gradients[place][1] for one in self._recent if place in one.gradients}
        for one in reversed(self._recent):
            obstacles |= one.obstacles.get(place, {})
        tp = found.pop() if len(found) == 1 else None
        return Evidence(gradient=(Partial(), tp), gradient_obstacles=obstacles)

    def _compare(self, follower: Follower, is_over: bool = False) -> None:
        """Compare the operations that the ranks have run. Collective.

        Args:
            is_over: Whether the forward has ended.

        Raises:
            ValueError: a statement of the user's is refuted. On every rank.
        """
        follower.sync(self._communicator)
        if not self.statements:
            return
        refuted = follower.refuted_statement(is_over)
        verdicts = self._communicator.exchange(torch.tensor([bool(refuted)], device="cpu"))
        if bool(verdicts.any()):
            raise agreed(ValueError(refuted or "a statement is refuted on another rank"))

    def note(self, evidence: Evidence, tensor: Tensor, original: Tensor, placed: Pair) -> None:
        """Note the placements of a hook's replacement for a tensor, also in the forwards that other
        FlexModels follow. Local.
        """
        follow.place_edited(self._communicator.mesh, tensor, original, placed)
        if evidence.follower is not None and evidence.follower in follow.recording():
            evidence.note_edit(evidence.follower.recorder.value(tensor))
