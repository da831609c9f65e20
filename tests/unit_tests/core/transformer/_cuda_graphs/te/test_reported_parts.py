"""What a report shows of hooks, of static inputs, and of engines that show no graphs."""

from functools import partial

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.plan import ordered_plan
from megatron.core.transformer._cuda_graphs.hooks import BACKWARD_HANDLER, runs_outside_graphs
from megatron.core.transformer._cuda_graphs.report.record import KINDS, HookRoute
from megatron.core.transformer._cuda_graphs.te.capture_observer import graph_counts, hook_routes, static_inputs_of
from megatron.core.transformer._cuda_graphs.te.stage_graphs import pools_of


@runs_outside_graphs
def gather(module, args):
    pass


def by_user(module, args):
    pass


def after_backward(module):
    pass


def wrapper(module, args):
    pass


class Counting:
    def __call__(self, module, args, output):
        pass


def test_hooks_go_where_capture_puts_them():
    layer = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    setattr(wrapper, BACKWARD_HANDLER, after_backward)
    layer.register_forward_pre_hook(gather)
    layer.register_forward_pre_hook(wrapper)
    layer[0].register_forward_pre_hook(partial(runs_outside_graphs(lambda module, args: None)))
    layer[1].register_forward_hook(Counting())
    layer.register_forward_pre_hook(by_user)
    layer[1].register_forward_pre_hook(by_user)
    before = dict(layer._forward_pre_hooks)
    routes = hook_routes([torch.nn.ReLU(), layer])
    outside = "test_hooks_go_where_capture_puts_them.<locals>.<lambda>"
    assert routes == [
        HookRoute(1, "", "gather", "forward_pre_hooks"),
        HookRoute(1, "", "after_backward", "backward_hooks"),
        HookRoute(1, "", "by_user", "withheld"),
        HookRoute(1, "0", outside, "withheld"),
        HookRoute(1, "1", "by_user", "recorded"),
        HookRoute(1, "1", "Counting", "recorded"),
    ]
    assert dict(layer._forward_pre_hooks) == before


def test_an_engine_that_shows_no_graphs_is_said_to():
    assert graph_counts(lambda: None) == dict.fromkeys(KINDS)
    assert pools_of([lambda: None]) == []


@pytest.mark.usefixtures("cpu_backend")
def test_static_inputs_that_serve_two_micro_batches_are_one():
    plan = ordered_plan([1, -1, 1, -1], [1], 1)
    shared, mask = torch.ones(4), torch.ones(2, dtype=torch.bool)
    samples = [((shared,), {"mask": mask}), ((shared,), {"mask": mask.clone()})]
    planned = [(0, 0, "forward"), (0, 0, "backward"), (0, 1, "forward"), (0, 1, "backward")]
    found = static_inputs_of(plan, [object(), object()], samples, planned)
    assert [
        (each.name, each.bytes, [(use.micro_batch, use.first, use.last) for use in each.uses]) for each in found
    ] == [
        ("hidden_states", 16, [(0, 0, 1), (1, 2, 3)]),
        ("mask", 2, [(0, 0, 1)]),
        ("mask", 2, [(1, 2, 3)]),
    ]
