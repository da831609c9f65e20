"""step_model: the work of a step, its time, and the fit."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks._step_model import fit
from benchmarks._step_model.predict import model, predictions
from benchmarks._step_model.runs import Run, read_runs, workload
from benchmarks._step_model.step import (
    ALL_LAYERS,
    EAGER,
    FULL_ITERATION,
    MODES,
    PER_LAYER,
    Gpu,
    Host,
    Link,
    compute_ms,
    exposed_ms,
    step_ms,
)
from benchmarks._step_model.workload import Workload
from benchmarks.step_model import main, split

SMALL = Workload(layers=8, hidden=1024, sequence=512, tokens=512)
GPU = Gpu(teraflops=400.0, layer_us=200.0, parameter_ps=20.0)
LINK = Link(gb_per_s=200.0, start_us=20.0)
HOST = Host({EAGER: 9.0, PER_LAYER: 0.9, ALL_LAYERS: 0.08}, outside=10.0, rest=4.0, rest_layer=0.1)


def run(host: str, work: Workload, mode: str, ms: float, **profile) -> Run:
    return Run(host, "2 x NVIDIA H200", "a run", work, mode, ms, profile)


def test_weights_are_those_of_the_matrices():
    assert SMALL.layer_parameters == 12 * 1024**2
    assert SMALL.parameters == 8 * 12 * 1024**2 + 32000 * 1024


def test_published_models_have_about_the_parameters_of_their_names():
    sizes = [model(name, ranks=8, tokens=1).parameters / 1e9 for name in ("8B", "13B", "70B")]
    assert sizes == pytest.approx([8.03, 13.0, 70.6], rel=0.01)


def test_a_causal_mask_halves_the_flops_of_attention():
    longer = replace(SMALL, sequence=1024)
    assert longer.layer_flops - SMALL.layer_flops == 512 * (4 + 8) * 1024 * 512 / 2


def test_a_rank_receives_all_parts_but_its_own():
    assert LINK.collective_us(1e8, 2) == pytest.approx(20 + 2e8 / 2 / 200e3)
    assert LINK.collective_us(1e8, 8) == pytest.approx(20 + 2e8 * 7 / 8 / 200e3)
    assert LINK.collective_us(1e8, 1) == 0


def test_the_slower_of_node_and_network_counts():
    slow = replace(LINK, network_gb_per_s=50.0)
    assert slow.collective_us(1e8, 16) == pytest.approx(20 + 2e8 / 2 / 50e3)
    assert LINK.collective_us(1e8, 16) == pytest.approx(20 + 2e8 * 15 / 16 / 200e3)


@pytest.mark.parametrize(("ranks", "hops"), [(2, 0), (8, 6), (16, 13 + 10), (1024, 895 + 10 * 127)])
def test_each_step_of_a_ring_but_the_first_adds_its_latency(ranks, hops):
    ring = replace(LINK, hop_us=1.0, network_hop_us=10.0)
    assert ring.collective_us(1e8, ranks) - LINK.collective_us(1e8, ranks) == pytest.approx(hops)


def test_where_compute_is_long_only_the_ends_of_a_pass_are_exposed():
    layer, embedding = (LINK.collective_us(each, 2) for each in (SMALL.layer_parameters, SMALL.embedding_parameters))
    slow = replace(GPU, layer_us=1e6, teraflops=1.0)
    assert exposed_ms(SMALL, slow, LINK) == pytest.approx(2 * (layer + embedding) / 1e3)


def test_where_compute_is_nothing_all_collectives_are_exposed():
    nothing = Gpu(teraflops=1e12, layer_us=0.0, parameter_ps=0.0)
    layer, embedding = (LINK.collective_us(each, 2) for each in (SMALL.layer_parameters, SMALL.embedding_parameters))
    gathered_and_reduced = 8 * 3 * layer + 2 * embedding
    assert exposed_ms(SMALL, nothing, LINK) == pytest.approx(gathered_and_reduced / 1e3)


def test_gathers_of_an_output_layer_of_its_own_can_be_exposed():
    nothing = Gpu(teraflops=1e12, layer_us=0.0, parameter_ps=0.0)
    assert exposed_ms(replace(SMALL, tied=False), nothing, LINK) > exposed_ms(SMALL, nothing, LINK)


def test_passes_repeat_with_micro_batches_and_the_optimizer_does_not():
    many = replace(SMALL, micro_batches=4)
    optimizer = SMALL.parameters / 2 * 20e-9
    assert compute_ms(many, GPU) - optimizer == pytest.approx(4 * (compute_ms(SMALL, GPU) - optimizer))
    assert exposed_ms(many, GPU, LINK) == 4 * exposed_ms(SMALL, GPU, LINK)


def test_a_step_takes_the_longer_of_host_and_gpu_and_then_the_rest():
    on_gpu = compute_ms(SMALL, GPU) + exposed_ms(SMALL, GPU, LINK)
    assert step_ms(SMALL, EAGER, GPU, LINK, HOST) == pytest.approx(10 + 8 * 9 + 4 + 8 * 0.1)
    assert step_ms(SMALL, FULL_ITERATION, GPU, LINK, HOST) == pytest.approx(on_gpu + 4 + 8 * 0.1)


def test_a_slow_host_slows_what_the_host_does():
    fast, slow = (step_ms(SMALL, EAGER, GPU, LINK, HOST, slowness) for slowness in (1.0, 1.5))
    assert slow == pytest.approx(1.5 * fast)


def test_least_squares_finds_the_values():
    x = np.arange(1.0, 6.0)
    found = fit.least_squares(lambda values: values[0] * x + values[1] - (3 * x + 0.5), [1.0, 1.0])
    assert found == pytest.approx([3.0, 0.5], rel=0.01)


def test_values_that_nothing_measures_stay_where_they_began():
    found = fit.least_squares(lambda values: values[:1] - 3, [1.0, 7.0])
    assert found == pytest.approx([3.0, 7.0], rel=0.01)


def works() -> list[Workload]:
    large = Workload(layers=16, hidden=2048, sequence=2048, tokens=2048)
    return [SMALL, replace(SMALL, layers=16), replace(SMALL, micro_batches=2), large]


def test_the_gpu_is_fitted_to_profiles_of_graphs():
    runs = [run("a", each, ALL_LAYERS, 1.0, compute_ms=compute_ms(each, GPU)) for each in works()]
    runs.append(run("a", SMALL, EAGER, 1.0, compute_ms=1e6))
    found = fit.fit_gpu(runs)
    assert [compute_ms(each, found) for each in works()] == pytest.approx(
        [compute_ms(each, GPU) for each in works()], rel=0.02
    )


def test_the_link_is_fitted_to_the_collectives_of_layers():
    runs = []
    for each in works():
        median = LINK.collective_us(each.layer_parameters, 2)
        runs.append(run("a", each, ALL_LAYERS, 1.0, collectives={"AllGather": {"calls": 2.0, "median_us": median}}))
    found = fit.fit_link(runs, Link())
    assert (found.gb_per_s, found.start_us) == pytest.approx((200, 20), rel=0.05)


@pytest.mark.parametrize("fitted", [fit.fit_gpu, lambda runs: fit.fit_link(runs, Link())])
def test_a_fit_without_profiles_says_what_is_missing(fitted):
    with pytest.raises(ValueError, match="no-profile"):
        fitted([run("a", SMALL, ALL_LAYERS, 1.0)])


def test_the_speed_of_each_host_is_found():
    runs = []
    for host, slowness in (("a", 1.0), ("b", 1.4)):
        for each in works():
            runs += [run(host, each, mode, step_ms(each, mode, GPU, LINK, HOST, slowness)) for mode in MODES]
    found = fit.fit_host(runs, GPU, LINK)
    assert found.slowness == pytest.approx({"a": 1.0, "b": 1.4}, rel=0.02)
    assert [fit.error(each, GPU, LINK, found) for each in runs] == pytest.approx([0.0] * len(runs), abs=0.03)


def test_large_models_and_all_but_the_smallest_of_another_host_are_checked():
    smallest = workload("B", 2)
    fitted = [run("a", replace(SMALL, layers=layers), EAGER, 1.0) for layers in (8, 16, 32)]
    many = run("a", replace(SMALL, micro_batches=4), EAGER, 1.0)
    checked = [run("b", smallest, EAGER, 1.0), run("b", replace(smallest, layers=16), EAGER, 1.0)]
    unknown_host = run("c", replace(smallest, layers=16), EAGER, 1.0)
    known, unknown = split([*fitted, many], [*checked, unknown_host])
    assert known == [*fitted[:2], checked[0]]
    assert unknown == [fitted[2], many, checked[1]]


def results(**found) -> dict:
    return {"hardware": "2 x NVIDIA H200", **found}


def test_the_work_of_a_run_follows_from_its_flags(tmp_path):
    path = tmp_path / "runs.json"
    rows = [{"variant": "native", "ms": 2.0}, {"variant": "te", "ms": 1.0}, {"variant": "eager", "error": "died"}]
    size = {"layers": 64, "micro_batches": 2}
    name = "A:--num-layers 32 --global-batch-size 8"
    path.write_text(
        json.dumps(results(configurations={name: rows, "C": rows}, models=[{**size, "variant": "eager", "ms": 3.0}]))
    )
    first, second = read_runs(path)
    assert (first.host, first.mode, first.ms) == ("runs", ALL_LAYERS, 2.0)
    assert first.work == Workload(layers=32, hidden=2048, sequence=2048, tokens=2048, micro_batches=4)
    assert second.work == replace(workload("B", 2), layers=64, micro_batches=2)


def test_times_of_the_cpu_backend_are_refused(tmp_path):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"hardware": "CPU backend", "configurations": {}}))
    with pytest.raises(ValueError, match="mean nothing"):
        read_runs(path)


def test_thresholds_are_the_fewest_tokens_from_which_on_it_holds():
    (found,) = (each for each in predictions([64], 4096, GPU, LINK, HOST, memory_gb=141) if each["model"] == "8B")
    ratios = {}
    for tokens in (found["eager_suffices"] // 2, found["eager_suffices"]):
        work = model("8B", ranks=64, tokens=tokens)
        best = min(step_ms(work, mode, GPU, LINK, HOST) for mode in MODES if mode != EAGER)
        ratios[tokens] = step_ms(work, EAGER, GPU, LINK, HOST) / best
    few, enough = ratios.values()
    assert few > 1.05 >= enough


def test_a_model_whose_states_exceed_the_memory_does_not_fit():
    fits = {
        (each["model"], each["gpus"]): each["fits"]
        for each in predictions([8, 64], 4096, GPU, LINK, HOST, memory_gb=141)
    }
    assert (fits["70B", 8], fits["70B", 64], fits["8B", 8]) == (False, True, True)


def measured(tmp_path, name: str, slowness: float, wrong: float = 1.0) -> str:
    """A file of results that a host of that speed would give; its largest model takes ``wrong`` times as long."""
    rows = {}
    for configuration in ("B", "A", "B:--num-layers 32"):
        work = workload(configuration, 2)
        median = LINK.collective_us(work.layer_parameters, 2)
        profile = {"compute_ms": compute_ms(work, GPU), "collectives": {"AllGather": {"median_us": median}}}
        factor = wrong if work.layers == 32 else 1.0
        names = {EAGER: "eager", ALL_LAYERS: "native", FULL_ITERATION: "full_iteration"}
        rows[configuration] = [
            {"variant": text, "ms": factor * step_ms(work, mode, GPU, LINK, HOST, slowness), "profile": profile}
            for mode, text in names.items()
        ]
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(results(configurations=rows)))
    return str(path)


@pytest.mark.parametrize(("wrong", "code"), [(1.0, 0), (1.3, 1)])
def test_the_exit_code_says_whether_a_checked_run_is_off(tmp_path, monkeypatch, capsys, wrong, code):
    fitted, checked = measured(tmp_path, "one", 1.0), measured(tmp_path, "two", 1.3, wrong)
    output = tmp_path / "model.json"
    arguments = ["--fit", fitted, "--check", checked, "--output", str(output), "--gpus", "64"]
    monkeypatch.setattr("sys.argv", ["step_model.py", *arguments])
    assert main() == code
    printed, found = capsys.readouterr().out, json.loads(output.read_text())
    assert ("off by more than 10%\n" in printed.split("checked:")[1].split("checked runs")[0]) == bool(code)
    assert (found["worst_error"] > 0.1) == bool(code)
    assert {(row["gpus"], row["tokens"]) for row in found["predictions"]} == {(64, 1024), (64, 4096)}
    assert found["hardware"] == "2 x NVIDIA H200"


def test_nothing_checked_is_a_failure(tmp_path, monkeypatch, capsys):
    path = Path(measured(tmp_path, "one", 1.0))
    found = json.loads(path.read_text())
    del found["configurations"]["B:--num-layers 32"]
    path.write_text(json.dumps(found))
    monkeypatch.setattr("sys.argv", ["step_model.py", "--fit", str(path)])
    assert main() == 1
    assert "nothing was checked" in capsys.readouterr().out
