"""The compiled dispatcher alone: which hooks of a site run, and the records that it makes by
itself.
"""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flex_model import _C
from flex_model.integrations import torch_private


class Calls:
    """Stands for the Python half: keeps what it is called with and adds one."""

    def __init__(self):
        self.seen = []

    def __call__(self, registration, module, tree):
        self.seen.append(registration)
        return tree + 1


def edit(registration, module, leaf, full):
    """Stands for the call of an editing function: None for a tensor that it leaves as it is."""
    return None if leaf.numel() == 0 else full.mul_(2)


def make(records=None, graph_task=lambda: -1, run_hook=None):
    calls = Calls() if run_hook is None else run_hook
    records = {} if records is None else records
    handlers = SimpleNamespace(
        forward=calls,
        edit_whole=edit,
        finish_edit=None,
        hook_failed=None,
        edit_drew=None,
        gather_settled=None,
        communicator=SimpleNamespace(edit=_C.EditMark()),
    )
    torch_functions = vars(torch_private.FOR_DISPATCHER) | {"current_graph_task": graph_task}
    dispatcher = _C.Dispatcher(records, handlers, SimpleNamespace(**torch_functions))
    dispatcher.activate([0], False)
    dispatcher.set_in_run(True)
    return dispatcher, calls, records


def add(site, name, groups=(0,), records_here=False, unpack_idx=0, edits_here=False):
    hook = _C.Hook(name, unpack_idx, name, None, records_here, edits_here)
    for group in groups:
        hook.tag(group)
    site.add(hook)
    return hook


def test_activate_tells_which_sites_woke_up_or_fell_asleep():
    dispatcher, _, _ = make()
    sites = [dispatcher.add_site(None) for _ in range(3)]
    add(sites[0], "a", (0, 1))
    add(sites[1], "b", (0, 2))
    assert dispatcher.activate([0], False) == sites[:2]
    assert dispatcher.activate([1], False) == [sites[1]]
    assert dispatcher.activate([1], False) == []


@pytest.mark.parametrize("records_here", [True, False])
def test_an_edit_gets_a_copy_and_its_result_replaces_the_tensor_in_the_tree(records_here):
    dispatcher, calls, records = make()
    module = nn.Identity()
    site = dispatcher.add_site(weakref.ref(module))
    add(site, "a", records_here=records_here, edits_here=True, unpack_idx=1)
    dispatcher.activate([0], False)
    first, x = torch.ones(1), torch.ones(2)
    after = site.call(module, (first, {"x": x}))
    assert after[0] is first and after[1]["x"].tolist() == [2, 2]
    assert x.tolist() == [1, 1] and calls.seen == []
    assert [record.tolist() for record in records.get("a", [])] == [[1, 1]] * records_here
    unchanged = (first, torch.empty(0))
    assert site.call(module, unchanged) is unchanged


def test_python_runs_hooks_that_are_installed_for_a_backward():
    dispatcher, calls, _ = make()
    module = nn.Identity()
    site = dispatcher.add_site(weakref.ref(module))
    hook = add(site, "a", records_here=True, edits_here=True)
    dispatcher.activate([0], False)
    hook.set_replays(True)
    site.call(module, torch.zeros(1))
    assert calls.seen == ["a"]


@pytest.mark.parametrize(
    "tree",
    [
        nn.Parameter(torch.zeros(1)),
        torch.zeros(1, device="meta"),
        torch.zeros(1).as_subclass(type("T", (torch.Tensor,), {})),
    ],
    ids=["parameter", "meta", "subclass"],
)
def test_what_is_no_plain_cpu_tensor_goes_to_python(tree):
    dispatcher, calls, _ = make()
    module = nn.Identity()
    site = dispatcher.add_site(weakref.ref(module))
    add(site, "a", records_here=True)
    dispatcher.activate([0], False)
    site.call(module, tree)
    assert calls.seen == ["a"]


def test_outside_of_runs_in_backward_and_for_missing_tensors_python_decides():
    dispatcher, calls, _ = make()
    module = nn.Identity()
    site = dispatcher.add_site(weakref.ref(module))
    add(site, "a", records_here=True, unpack_idx=1)
    dispatcher.activate([0], False)
    site.call(module, torch.zeros(1))
    assert dispatcher.set_in_run(False)
    site.call(module, torch.zeros(1))
    assert calls.seen == ["a", "a"]

    dispatcher, calls, records = make(graph_task=lambda: 7)
    site = dispatcher.add_site(weakref.ref(module))
    add(site, "a", records_here=True)
    dispatcher.activate([0], False)
    site.call(module, torch.zeros(1))
    assert calls.seen == ["a"] and records == {}


def test_a_hook_may_close_the_dispatcher_that_runs_it():
    dispatcher = None

    def close(registration, module, tree):
        dispatcher.close()
        return tree

    dispatcher = make(run_hook=close)[0]
    site = dispatcher.add_site(None)
    add(site, "a")
    add(site, "b")
    dispatcher.activate([0], False)
    x = torch.zeros(1)
    assert site.call(None, x) is x
    assert not site.is_active


def test_a_closed_dispatcher_lets_go_of_its_callback():
    dispatcher, calls, _ = make()
    call = dispatcher.add_site(None).call
    alive = weakref.ref(calls)
    dispatcher.close()
    del calls
    gc.collect()
    assert alive() is None
    x = torch.zeros(1)
    assert call(None, x) is x
