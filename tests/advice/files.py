"""Advice about files: trainable modules and stores."""

import shutil
import warnings
from unittest import mock

import torch
import torch.distributed.checkpoint
from torch import nn

import models
from advice.triggers import BATCH, in_a_folder
from flex_model import ActivationStore, FlexModel, HookFunction
from flex_model.records.store import files

# ---- Trainable modules ---------------------------------------------------------------------------


def probing(name="probe", width=3):
    flex = FlexModel(models.mlp())
    flex.register_trainable_module(name, nn.Linear(width, width))
    return flex


def adam(flex, *more):
    return torch.optim.Adam([*flex.trainable_modules.parameters(), *more])


@in_a_folder
def saved(folder, **settings):
    flex = probing()
    settings = {name: make(flex) for name, make in settings.items()}
    flex.save_trainable_modules(folder / "a", **settings)
    return probing().load_trainable_modules(folder / "a")


@in_a_folder
def saved_apart(folder):
    flex = probing()
    flex.save_trainable_modules(folder / "a", adam(flex))
    of_model = torch.optim.Adam(flex.module.parameters()).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        torch.distributed.checkpoint.save(of_model, checkpoint_id=folder / "b", no_dist=True)


@in_a_folder
def loaded(folder, optimizer=None, own=None, **settings):
    """A file of `probing()`, into another model and optimizer."""
    flex, other = probing(), probing(**settings)
    flex.save_trainable_modules(folder / "a", optimizer and optimizer(flex))
    other.load_trainable_modules(folder / "a", own and own(other))


def in_groups(*names):
    return lambda flex: torch.optim.Adam(
        [{"params": [flex.trainable_modules["probe"].get_parameter(name)]} for name in names]
    )


# ---- Stores --------------------------------------------------------------------------------------


class Configured:
    def __init__(self, **settings):
        self.settings = settings

    def to_dict(self):
        return self.settings


def storing(store, *names, width=1):
    model = models.mlp()
    model.config = Configured(width=width)
    flex = FlexModel(model, store)
    for name in names or ("fc1",):
        flex.register_forward_hook(HookFunction(name))
    return flex


def filled(folder, *names, **settings):
    """A store with a batch more."""
    store = ActivationStore(folder, **settings)
    with storing(store, *names) as flex:
        flex(BATCH)
    return store


@in_a_folder
def again(folder, action=None, **settings):
    """A store of one batch gets another one, by other settings; what would do, if anything."""
    filled(folder, key={"data": 1})
    settings.setdefault("key", {"data": 1})
    if action == "delete":
        shutil.rmtree(folder)
    where = folder / "other" if action == "another folder" else folder
    names, width = settings.pop("names", ["fc1"]), settings.pop("width", 1)
    with storing(ActivationStore(where, **settings), *names, width=width) as flex:
        flex(BATCH)


def differing(says, **settings):
    """A row of a folder that holds something else: another folder, or a new one, will do."""
    return {
        says: (
            lambda: again(**settings),
            lambda: [again(action, **settings) for action in ("another folder", "delete")],
        )
    }


@in_a_folder
def of_others(folder, has_own_folder):
    (folder / "thesis.tex").write_text("mine")
    filled(folder / "store" if has_own_folder else folder)


@in_a_folder
def spoilt(folder, pattern, is_deleted):
    filled(folder)
    (path,) = folder.glob(pattern)
    path.write_bytes(b"{}")
    if is_deleted:
        shutil.rmtree(folder)
        filled(folder)
    list(ActivationStore(folder).tensors("fc1"))


@in_a_folder
def without_manifest(folder, action):
    filled(folder)
    path = folder / "manifest.json"
    text = path.read_bytes()
    path.unlink()
    if action == "put back":
        path.write_bytes(text)
    elif action == "delete":
        shutil.rmtree(folder)
    assert filled(folder).num_batches == {"put back": 2, "delete": 1}[action]


@in_a_folder
def two_writers(folder, action):
    first = storing(ActivationStore(folder))
    try:
        if action == "close":
            first.restore()
        filled(folder / "own" if action == "own folder" else folder)
    finally:
        first.restore()


@in_a_folder
def many_names(folder, **settings):
    """Where a file could hold the names of one batch, not those of two."""
    store = ActivationStore(folder, **settings)
    with mock.patch.object(files, "_MAX_HEADER_BYTES", 400), storing(store, "fc1", "act") as flex:
        flex(BATCH)
        flex(BATCH)
    assert len(list(ActivationStore(folder).tensors("act"))) == 2


@in_a_folder
def late(folder, how):
    with FlexModel(models.mlp(), ActivationStore(folder)) as flex:
        flex.register_full_backward_hook(HookFunction("fc1"))
        if how == "late":
            first = flex(BATCH).sum()
            flex(BATCH)
            first.backward()
        elif how == "before":
            flex(BATCH).sum().backward()
            flex(BATCH)
        else:
            with flex.active():
                first = flex(BATCH).sum()
                flex(BATCH)
                first.backward()
    assert len(list(ActivationStore(folder).tensors("fc1"))) == 1


@in_a_folder
def flushed(folder, is_inside):
    store = ActivationStore(folder)
    with storing(store) as flex:
        with flex.active():
            flex(BATCH)
            if is_inside:
                store.flush()
        store.flush()
        assert store.num_batches == 1


@in_a_folder
def closed(folder, wraps_again):
    with ActivationStore(folder) as store:
        flex = storing(store)
    if wraps_again:
        flex = FlexModel(flex.restore(), store)
        flex.register_forward_hook(HookFunction("fc1"))
    try:
        flex(BATCH)
    finally:
        flex.restore()


@in_a_folder
def torn(folder, loads):
    flex = probing()
    for name in ("older", "newer"):
        flex.save_trainable_modules(folder / name)
    path = folder / "newer"
    path.write_bytes(path.read_bytes()[:-1])
    flex.load_trainable_modules(folder / loads)


@in_a_folder
def one_store(folder, how):
    """Two FlexModels over a store, or one after the other."""
    store = ActivationStore(folder / "a")
    first = storing(store)
    if how == "restored":
        first.restore()
    other = ActivationStore(folder / "b") if how == "own" else store
    try:
        storing(other).restore()
    finally:
        first.restore()


ROWS = {
    "give flex.trainable_modules.parameters() an optimizer of their own": (
        lambda: saved(optimizer=lambda flex: adam(flex, *flex.module.parameters())),
        saved_apart,
    ),
    "has {}, which can't be saved; keep tensors": (
        lambda: saved(extra=lambda flex: object()),
        lambda: saved(extra=lambda flex: {"a": [torch.ones(2), 3, "text"]}),
    ),
    "load it without one, or save with": (
        lambda: loaded(own=adam),
        lambda: (loaded(), loaded(adam, adam)),
    ),
    "make it of the same ones, in the same order": (
        lambda: loaded(in_groups("weight", "bias"), in_groups("bias", "weight")),
        lambda: loaded(in_groups("weight", "bias"), in_groups("weight", "bias")),
    ),
    "register the modules that were saved, by the same names": (
        lambda: loaded(name="sae"),
        lambda: loaded(name="probe"),
    ),
    "here; make it as it was saved": (lambda: loaded(width=4), lambda: loaded(width=3)),
    "is not a whole file of save_trainable_modules ({}: {}); take an older one": (
        lambda: torn("newer"),
        lambda: torn("older"),
    ),
    # Stores.
    **differing("holds records with key", key={"data": 2}),
    **differing("holds records of a model with another", width=2),
    **differing("holds records of other hooks", names=["fc1", "act"]),
    "holds other files ({}) and no": (lambda: of_others(False), lambda: of_others(True)),
    "is not what a store wrote ({}); delete": (
        lambda: spoilt("batches-*.json", is_deleted=False),
        lambda: spoilt("batches-*.json", is_deleted=True),
    ),
    "is not the file that a store wrote with": (
        lambda: spoilt("*.safetensors", is_deleted=False),
        lambda: spoilt("*.safetensors", is_deleted=True),
    ),
    "is gone; put it back, or delete the folder": (
        lambda: without_manifest(None),
        lambda: (without_manifest("put back"), without_manifest("delete")),
    ),
    "is being written by another FlexModel or process": (
        lambda: two_writers(None),
        lambda: (two_writers("own folder"), two_writers("close")),
    ),
    "restore() that first, or give each a store of its own": (
        lambda: one_store(None),
        lambda: (one_store("restored"), one_store("own")),
    ),
    "give a smaller shard_bytes": (many_names, lambda: many_names(shard_bytes=1)),
    "call backward before that, or run both inside one": (
        lambda: late("late"),
        lambda: (late("before"), late("in one run")),
    ),
    "whose batch is not whole; call it after": (
        lambda: flushed(is_inside=True),
        lambda: flushed(is_inside=False),
    ),
    "was closed; wrap the model again to go on": (
        lambda: closed(wraps_again=False),
        lambda: closed(wraps_again=True),
    ),
}
