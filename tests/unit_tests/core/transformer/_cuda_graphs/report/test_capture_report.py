"""The report of a capture under Megatron-FSDP has the graphs, passes, static inputs and hooks of the model.

One rank on the CPU backend, three layers.
"""

import json
from collections import Counter

import pytest
import torch

from megatron.core.transformer._cuda_graphs.hooks import HOOK_KINDS
from megatron.core.transformer._cuda_graphs.report.timeline import Timeline
from tests.unit_tests.core.distributed.captured_training import CapturedTraining, graphed
from tests.unit_tests.core.distributed.fsdp_variants import Variant

pytestmark = pytest.mark.usefixtures("side_stream")

LAYERS = 3
ALL, ONE, MODEL = 0, 1, -1  # layers in a graph


class Captured:
    """A capture of a case, with a report in ``folder``.

    Attributes:
        report: The report as JSON.
        recorded: How many graphs the tape recorded for it.
        in_passes: How many of them before the last pass ended, according to the report.
        hooks: How many hooks layers had before.
    """

    def __init__(self, folder, monkeypatch, layers_per_graph, variant=None, **changes):
        self.recorded = self.hooks = 0
        self.in_passes: int | None = None
        capture_end = torch.cuda.CUDAGraph.capture_end
        captured = self

        def counting(graph):
            capture_end(graph)
            captured.recorded += 1

        end = Timeline.end

        def ending(timeline):
            if captured.in_passes is None:
                captured.in_passes = captured.recorded
            end(timeline)

        class Reporting(CapturedTraining):
            def make_helper(self):
                self.config.cuda_graph_report = str(folder)
                return super().make_helper()

            def capture(self, capture):
                captured.hooks = sum(len(getattr(each, f"_{kind}")) for each in self.layers for kind in HOOK_KINDS)
                with monkeypatch.context() as patched:
                    patched.setattr(torch.cuda.CUDAGraph, "capture_end", counting)
                    patched.setattr(Timeline, "end", ending)
                    super().capture(capture)

        training = Reporting(graphed(layers_per_graph, **changes), variant=variant)
        self.report = json.loads((folder / "capture.json").read_text())
        self.page = (folder / "capture.html").read_text()
        training.delete()


@pytest.fixture
def capture(one_rank, tmp_path, monkeypatch):
    """A function that captures a case."""
    return lambda *arguments, **changes: Captured(tmp_path / "report", monkeypatch, *arguments, **changes)


def steps(passes):
    return [(each["layer"], each["micro_batch"], each["kind"]) for each in passes]


ORDER = [(layer, 0, "forward") for layer in range(LAYERS)] + [(layer, 0, "backward") for layer in (2, 1, 0)]


@pytest.mark.parametrize(
    ("layers_per_graph", "together", "graphs", "passes"),
    [
        (ALL, [0, 0, 0], [1, 0, 0], [(0, 0, "forward"), (0, 0, "backward")]),
        (ONE, [None] * 3, [1, 1, 1], ORDER),
    ],
)
def test_graphs_of_layers(capture, layers_per_graph, together, graphs, passes):
    captured = capture(layers_per_graph)
    report = captured.report
    assert report["engine"] == "native" and not report["whole_model"]
    assert [layer["recorded_with"] for layer in report["layers"]] == together
    for kind in ("forward", "backward"):
        assert [layer["graphs"][kind] for layer in report["layers"]] == graphs
        assert report["graphs"][kind] == sum(graphs)
    assert report["graphs"]["weight_gradients"] == 0
    assert captured.recorded == 2 * sum(graphs) + report["collectives"]
    assert captured.in_passes == 2 * sum(graphs)
    assert [pool["graphs"] for pool in report["pools"]] == [2 * sum(graphs)]
    assert all(pool["bytes"] > 0 for pool in report["pools"])
    assert [tuple(step) for step in report["order"]] == ORDER
    assert steps(report["passes"]) == passes


def test_graphs_of_the_whole_model(capture):
    captured = capture(MODEL)
    report = captured.report
    assert report["whole_model"] and report["layers"] == report["hooks"] == []
    assert report["graphs"] == {"forward": 1, "backward": 1, "weight_gradients": 0}
    assert captured.recorded == 2 + report["collectives"]
    assert steps(report["passes"]) == [(None, 0, "forward"), (None, 0, "backward")]
    assert [part["what"] for part in report["eager"]] == ["calls without labels or with tensors of other shapes"]


@pytest.mark.parametrize("layers_per_graph", [ALL, ONE, MODEL])
def test_times_follow_one_another_and_add_up_to_less_than_all(capture, layers_per_graph):
    report = capture(layers_per_graph).report
    seconds = report["seconds"]
    assert seconds.pop("waiting") == 0  # there is no other rank
    assert all(value > 0 for value in seconds.values())
    assert seconds["warm_up"] + seconds["capture"] < seconds["total"]
    assert sum(each["seconds"] for each in report["passes"]) == pytest.approx(seconds["capture"])
    ends = [each["start"] + each["seconds"] for each in report["passes"]]
    starts = [each["start"] for each in report["passes"]]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    times = [sample["time"] for sample in report["memory"]]
    assert times == sorted(times)
    phases = Counter(sample["phase"] for sample in report["memory"])
    assert phases == {"start": 1, "warm-up": 1, "capture": len(starts), "captured": 1, "end": 1}


def test_times_of_layers_add_up(capture):
    report = capture(ONE).report
    for name in ("warm_up", "capture"):
        of_layers = [layer[f"{name}_seconds"] for layer in report["layers"]]
        assert min(of_layers) > 0
        assert sum(of_layers) == pytest.approx(report["seconds"][name])


def add_hooks(model):
    """Give one layer a hook, and a module in it another."""
    layer = model.decoder.layers[1]
    layer.register_forward_hook(on_the_layer)
    layer.mlp.register_forward_pre_hook(inside)


def on_the_layer(module, args, output):
    pass


def inside(module, args):
    pass


def test_hooks_and_where_they_went(capture):
    captured = capture(ONE, variant=Variant(graphed(ONE), change=add_hooks))
    routes = [(hook["layer"], hook["module"], hook["hook"], hook["route"]) for hook in captured.report["hooks"]]
    on_layers = [route for route in routes if not route[1]]
    assert len(on_layers) == captured.hooks == 4 * LAYERS + 1
    fsdp = {
        "unshard_for_forward": "forward_pre_hooks",
        "release_after_forward": "forward_hooks",
        "unshard_for_backward": "backward_pre_hooks",
        "release_after_backward": "backward_hooks",
    }
    for layer in range(LAYERS):
        for name, route in fsdp.items():
            assert (layer, "", f"FsdpHooks.{name}", route) in routes
    assert (1, "", "on_the_layer", "withheld") in routes
    assert (1, "mlp", "inside", "recorded") in routes


def test_static_inputs_and_their_uses(capture):
    inputs = capture(ONE).report["static_inputs"]
    uses = [(each["name"], use["layer"], use["first"], use["last"]) for each in inputs for use in each["uses"]]
    hidden = [use for use in uses if use[0] == "hidden_states"]
    assert hidden == [("hidden_states", layer, layer, 2 * LAYERS - 1 - layer) for layer in range(LAYERS)]
    assert [len(each["uses"]) for each in inputs if each["name"] == "rotary_pos_emb"] == [LAYERS]
    case = graphed(ONE)
    sizes = {each["bytes"] for each in inputs if each["name"] == "hidden_states"}
    assert sizes == {case.sequence * case.micro_batch * case.hidden * 4}


@pytest.mark.parametrize(
    ("modules", "expected"), [((), []), (("attn",), [("all else in layers", "--cuda-graph-modules names attn only")])]
)
def test_what_stays_eager(capture, modules, expected):
    eager = [(part["what"], part["why"]) for part in capture(ONE, modules=modules).report["eager"]]
    names = [what for what, _ in eager]
    assert eager[: len(expected)] == expected
    assert names[len(expected) :] == ["embedding (LanguageModelEmbedding)", "decoder.final_layernorm (LayerNorm)"]


def test_the_page_draws_every_pass(capture):
    page = capture(ONE).page
    for layer in range(1, LAYERS + 1):
        for kind in ("forward", "backward"):
            assert page.count(f"<title>layer {layer} (TransformerLayer), micro-batch 0, {kind}: ") == 1
