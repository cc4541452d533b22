"""Advice about edits of `flex_model.editing`, and about experiments."""

from argparse import Namespace

import torch
from torch import nn

import models
from advice.triggers import in_a_folder
from flex_model import ActivationStore, FlexModel, HookFunction, editing

X = models.random(3, 5, 8)  # rows, positions, units
VECTOR = models.random(8, seed=3)


def edited(edit, x=X):
    return edit(None, x.clone(), Namespace(), {})


def layers(**settings):
    first, last = (models.seeded(nn.Linear, 8, 8, seed=seed) for seed in (1, 2))
    return FlexModel(nn.Sequential(first, nn.Tanh(), last).double(), {}, **settings)


def at(make, name="0", **settings):
    with layers() as flex:
        flex.register_trainable_module("probe", nn.Linear(8, 8).double())
        flex.register_forward_hook(make(name, **settings))
        flex(X)


def sides(*arguments):
    """A hook on a module with two outputs for each of the arguments' ``unpack_idx``."""
    return [editing.zero().at("", unpack_idx=index) for index in arguments]


def lens(name, hook):
    edit = editing.logit_lens("2.weight")
    return edit.at(name) if hook == "at" else HookFunction(name, editing_function=edit)


def captures(how):
    kept, flex = [editing.capture(), editing.capture()], layers()
    for i in range(2):
        flex.register_forward_hook(kept[i * (how == "each")].at(f"{2 * i}"))
    flex(X)


def patches(captured):
    kept, flex = editing.capture(), layers()
    if captured:
        with flex.register_forward_hook(kept.at("0")):
            flex(X)
    flex.register_forward_hook(editing.patch(kept).at("0"))
    flex(-X)


def total(output):
    return output.sum()


def patching(other=-X, clean=X, flex=None, kind="activation", site="0", **settings):
    patch = getattr(editing, f"{kind}_patching")
    return patch(flex or layers(), clean, other, [site], **{"metric": total, **settings})


def attribution(flex=None, **settings):
    return patching(flex=flex, kind="attribution", **settings)


def without_gradients(*required, grad=True):
    flex = layers()
    flex.wrapped_module_requires_grad(False)
    for name in required:
        flex.module.get_parameter(name).requires_grad_()
    with torch.set_grad_enabled(grad):
        attribution(flex)


def all_require_gradients():
    flex = layers()
    flex.wrapped_module_requires_grad()
    attribution(flex)


def shorter(is_padded):
    other = X[:, :3]
    patching(nn.functional.pad(other, (0, 0, 0, 2)) if is_padded else other)


def inside(is_active):
    flex = layers()
    flex.create_hook_group("more", "2", editing_function=lambda m, x, s, ms: 2 * x)
    if is_active:
        with flex.active():
            patching(flex=flex)
    found = patching(flex=flex, groups=["more"])
    assert torch.equal(found.values, 2 * patching(flex=layers()).values)


def beside_an_edit(**settings):
    flex = layers()
    flex.create_hook_group("more", "2", editing_function=lambda m, x, s, ms: 2 * x)
    patching(flex=flex, groups="more", **settings)


@in_a_folder
def into(folder, is_store):
    with layers() as flex:
        model = flex.restore()
    with FlexModel(model, ActivationStore(folder) if is_store else {}) as flex:
        patching(flex=flex)


def turned(sites, **settings):
    class Turned(nn.Module):
        def forward(self, x):
            return x.transpose(0, 1)

    flex = FlexModel(nn.Sequential(nn.Tanh(), Turned()))
    editing.activation_patching(flex, X, -X, sites, total, **settings)


def transposed(**settings):
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8).double()

        def forward(self, x):
            return self.layer(x).transpose(0, 1)

    patching(flex=FlexModel(Transposed()), site="layer", batch=2, **settings)


@in_a_folder
def resumed(folder, other):
    patching(resume=folder / "map.json")
    patching(resume=folder / other, positions=[0])


@in_a_folder
def damaged(folder, how="kept"):
    file = folder / "map.json"
    file.write_text("{")
    if how == "removed":
        file.unlink()
    patching(resume=file)


def edge(receiver):
    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layer, self.wide, self.norm = (
                nn.Linear(8, width).double() for width in (8, 8, 9, 8)
            )
            self.last = nn.Linear(9, 8).double()

        def forward(self, x):
            x = self.embed(x)
            x = x + self.layer(x)
            return self.last(self.wide(x)) + self.norm(x)

    arguments = (["layer"], [editing.Site(receiver, "input")], total)
    editing.integrated_gradients(FlexModel(Stream()), X, -X, *arguments, embedding="embed")


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.after = nn.Linear(8, 8).double(), nn.Identity()

    def forward(self, x):
        return self.after(self.layer(self.layer(x)))


def of_twice(site):
    attribution(FlexModel(Twice()), site=site)


def with_a_hook(is_removed):
    model = nn.Sequential(*(nn.Linear(8, 8).double() for _ in range(3)))
    handle = model[1].weight.register_post_accumulate_grad_hook(print)
    if is_removed:
        handle.remove()
    attribution(FlexModel(model))
    if is_removed:
        model[1].weight.register_post_accumulate_grad_hook(print)


ROWS = {
    "remove it by its handle, and register it again afterwards": (
        lambda: with_a_hook(is_removed=False),
        lambda: with_a_hook(is_removed=True),
    ),
    "clamp: give min=, max= or both": (editing.clamp, lambda: edited(editing.clamp(max=0.5))),
    "a direction has a number for every unit; set it to zero in the units to": (
        lambda: editing.project_out(VECTOR, units=slice(4)),
        lambda: edited(editing.project_out(VECTOR * (torch.arange(8) < 4))),
    ),
    "give the dim of the units with dims=": (
        lambda: edited(editing.project_out(models.random(5))),
        lambda: edited(editing.project_out(models.random(5), dims={"units": 1, "positions": 2})),
    ),
    "register it with edit.at(module_name)": (
        lambda: at(lens, hook="plain"),
        lambda: at(lens, hook="at"),
    ),
    "give it one HookFunction for each": (lambda: sides((0, 1)), lambda: sides(0, 1)),
    "chain: give at least one edit": (editing.chain, lambda: edited(editing.chain(editing.zero()))),
    "keep must be a function or None": (
        lambda: editing.logit_lens("2.weight", keep=3),
        lambda: [editing.logit_lens("2.weight", keep=keep) for keep in (total, None)],
    ),
    "has an activation of another module; make one per module": (
        lambda: captures("one"),
        lambda: captures("each"),
    ),
    "captured; register the capture and run the model first": (
        lambda: patches(False),
        lambda: patches(True),
    ),
    "give one value, one per unit, or more dims": (
        lambda: edited(editing.steer(models.random(7))),
        lambda: [edited(editing.steer(t)) for t in (models.random(1), VECTOR, X)],
    ),
    "give it as many dims as the activation has, in the same order": (
        lambda: edited(editing.steer(X[0], dims={"positions": 0, "rows": 1})),
        lambda: edited(editing.steer(X[:, :1], dims={"positions": 0, "rows": 1})),
    ),
    "name must be the str passed to register_trainable_module": (
        lambda: at(editing.splice(nn.Linear(8, 8)).at),
        lambda: at(editing.splice("probe").at),
    ),
    "add= is for adapters, error= and latents= for autoencoders": (
        lambda: at(editing.splice("probe", add=True, error=True).at),
        lambda: [at(editing.splice("probe", **{name: True}).at) for name in ("add", "error")],
    ),
    "leave out units= and heads=": (
        lambda: at(editing.splice("probe", units=3).at),
        lambda: at(editing.splice("probe").at),
    ),
    # Experiments.
    "changes of the metric; use values": (
        lambda: attribution().recovered,
        lambda: attribution().values.sum(),
    ),
    "attribution_patching: give metric=": (
        lambda: attribution(metric=None),
        lambda: attribution(metric=total),
    ),
    "let parameters before it require one": (
        without_gradients,
        lambda: (without_gradients("0.weight"), all_require_gradients()),
    ),
    "wrap the model with edit_on='all'": (
        lambda: attribution(layers(edit_on="rank0")),
        lambda: attribution(layers(edit_on="all")),
    ),
    "pad them, so that a position means the same in both": (
        lambda: shorter(False),
        lambda: shorter(True),
    ),
    "call it once for each number": (
        lambda: turned(["0", "1"]),
        lambda: (turned(["0"]), turned(["1"]), turned(["0", "1"], positions=[1])),
    ),
    "call it outside of active(), forward passes": (lambda: inside(True), lambda: inside(False)),
    "wrap the model with a dict as output_ptr": (
        lambda: into(is_store=True),
        lambda: into(is_store=False),
    ),
    "should have {} rows at dim {}; choose a module whose tensor has a dim of rows, and name it": (
        transposed,
        lambda: transposed(output=editing.Site("", where={"dims": {"rows": 1, "positions": 0}})),
    ),
    "pad the batch, or leave out batch=": (
        lambda: patching(X[:0], X[:0], batch=2),
        lambda: patching(batch=2),
    ),
    "would get the copies of the rows as one batch; leave out batch=": (
        lambda: beside_an_edit(batch=2),
        beside_an_edit,
    ),
    "needs one FlexModel(batch_dim=) for all inputs; leave out batch=": (
        lambda: patching(flex=layers(batch_dim={"input": 0}), batch=2),
        lambda: (
            patching(flex=layers(batch_dim=0), batch=2),
            patching(flex=layers(batch_dim={"input": 0})),
        ),
    ),
    "has the values of another experiment": (
        lambda: resumed("map.json"),
        lambda: resumed("other.json"),
    ),
    "is no file of patched runs, or is damaged": (lambda: damaged(), lambda: damaged("removed")),
    "give at least one batch of inputs": (
        lambda: editing.jacobian_lens(layers(), [], {0: "0"}, "2", positions=[1, 2]),
        lambda: editing.jacobian_lens(layers(), [X], {0: "0"}, "2", positions=[1, 2]),
    ),
    "positions is among {}; give positions=": (
        lambda: editing.jacobian_lens(layers(), [X], {0: "0"}, "2"),
        lambda: editing.jacobian_lens(layers(), [X], {0: "0"}, "2", positions=[1, 2]),
    ),
    "{}; leave {}= out of the where= of": (
        lambda: patching(site=editing.Site("0", where={"positions": [1]})),
        lambda: patching(positions=[1]),
    ),
    "is used here; leave all but dims= out of its where=": (
        lambda: patching(output=editing.Site("2", where={"units": 3})),
        lambda: patching(output=editing.Site("2", where={"dims": {"rows": 0}})),
    ),
    "and its Jacobian the identity; leave it out": (
        lambda: editing.jacobian_lens(layers(), [X], {0: "0", 2: "2"}, "2", positions=[1, 2]),
        lambda: editing.jacobian_lens(layers(), [X], {0: "0"}, "2", positions=[1, 2]),
    ),
    "has one row only; give source=": (
        lambda: edited(editing.resample(), X[:1]),
        lambda: edited(editing.resample(X[1:]), X[:1]),
    ),
    "choose sites of one stream": (lambda: edge("last"), lambda: edge("norm")),
    "choose modules that are called once": (lambda: of_twice("layer"), lambda: of_twice("after")),
}
