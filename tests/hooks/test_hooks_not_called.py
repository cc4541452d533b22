"""A hook whose module was not run is seen: by a warning the first time, by a row of ``explain()``.
Before, no warning was given.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookError, HookFunction, HookNotCalledWarning
from flex_model.pipelining import SplitPoint, pipeline
from shared_edits import double
from tiers import ways

BATCH = models.random(4, 6)


class Branches(nn.Module):
    """Runs ``often`` always, ``seldom`` for long inputs, ``never`` never."""

    def __init__(self):
        super().__init__()
        self.often, self.seldom, self.never = (nn.Linear(6, 6) for _ in range(3))
        self.late = nn.ModuleList([nn.Identity()])

    def forward(self, x):
        x = self.often(x)
        return self.late[0](self.seldom(x) if len(x) > 4 else x)


def wrapped(*names, edit=None, **settings):
    flex = models.replicas(FlexModel(models.seeded(Branches).double(), {}, **settings))
    for name in names:
        flex.register_forward_hook(HookFunction(name, editing_function=edit))
    return flex


def why(flex):
    return {row.name: row.why for row in flex.explain()}


@pytest.mark.parametrize("edit", [None, double])
@pytest.mark.parametrize("way", ways("one", "tp", "dp"))
def test_a_hook_that_is_not_called(way, edit):
    flex = wrapped("often", "never", "late", edit=edit, **way.sizes)
    with pytest.warns(
        HookNotCalledWarning, match="forward hook on 'never', forward hook on 'late'"
    ):
        flex(BATCH)
    flex(BATCH)  # once per hook: warnings are errors here
    for name in ("often", "never", "late"):
        assert (why(flex)[name] == "not called in the last run") == (name != "often"), name
    assert "not called in the last run" in str(flex.explain())
    flex.register_forward_pre_hook(HookFunction("never", output_name="another"))
    with pytest.warns(HookNotCalledWarning, match="^forward-pre hook on 'never': not called"):
        flex(BATCH)
    flex.restore()


@pytest.mark.parametrize("way", ways("one", "tp"))
def test_a_conditional_module(way):
    """It may be reached late, when the forward is known: nothing was known of it."""
    flex, long = wrapped("often", "seldom", **way.sizes), models.random(5, 6)
    whole = models.seeded(Branches).double()
    with pytest.warns(HookNotCalledWarning, match="'seldom'"):
        flex(BATCH)
    flex(long)
    if way.tp == 1 or dist.get_rank() == 0:
        assert_close(flex.output_ptr["seldom"], [whole.seldom(whole.often(long))])
    flex(BATCH)  # it was called before: the row shows it
    assert why(flex)["seldom"] == "not called in the last run"
    flex(long)
    assert why(flex)["seldom"] != "not called in the last run"
    flex.restore()


def test_where_nothing_is_wrong():
    flex = wrapped("often", "seldom", "never")
    flex.update_hook_groups("never", "probe")
    flex.run_until("often", BATCH)  # left early
    flex(models.random(5, 6), groups="probe", complement=True)  # not chosen
    with flex.active():  # the model was not run
        flex.module.often(BATCH)
    with pytest.raises(RuntimeError):  # it failed
        flex(BATCH[:, :2])
    flex.register_full_backward_hook(HookFunction("never", output_name="gradient"))
    flex.restore()
    flex = wrapped("seldom")
    with flex.active():  # one run of several forwards
        flex(BATCH)
        flex(models.random(5, 6))


def test_many_hooks_make_one_warning():
    model = nn.Sequential(*(Branches() for _ in range(8))).double()
    flex = FlexModel(model)
    flex.create_hook_group("all", "never")
    with pytest.warns(HookNotCalledWarning, match="'4.never' and 3 more: not called") as caught:
        flex(BATCH)
    assert len(caught) == 1


def test_as_an_error_it_leaves_the_wrapper_whole():
    flex = wrapped("often", "never")
    with pytest.raises(HookNotCalledWarning):  # the filter of this test run
        flex(BATCH)
    flex(BATCH)
    assert len(flex.output_ptr["often"]) == 1
    with pytest.raises(HookError, match="raised ZeroDivisionError"):
        wrapped("often", edit=lambda *args: 1 / 0)(BATCH)


@pytest.mark.ranks(2)
def test_modules_of_other_stages():
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
    pipe = pipeline(model, (BATCH,), split_spec={"2": SplitPoint.BEGINNING}, method="modules")
    stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
    flex = FlexModel(ScheduleGPipe(stage, 2), {})
    for i in range(4):
        flex.register_forward_hook(HookFunction(str(i)))
    with torch.no_grad():
        flex(BATCH)
    assert "not called" not in str(flex.explain())
    flex.restore()
