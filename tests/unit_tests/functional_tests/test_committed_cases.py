"""The cases of the repository and their golden values agree with each other."""

import json
import sys

import pytest

pytest.importorskip("megatron.core")

from tests.functional_tests._runner.case import CASES, find
from tests.functional_tests._runner.golden import NUMBERS
from tests.functional_tests._runner.machine import CPU_BACKEND
from tests.support.ranks.on_cpu_backend import on_cpu_backend

pytestmark = pytest.mark.sampled

EVERY = {case.name: case for case in find([])}
GRAPHED = [case for case in EVERY.values() if case.graphs != "none"]
RECORDED = [(case, file) for case in GRAPHED for file in sorted(case.folder.glob("golden_values_*.json"))]


@pytest.fixture(autouse=True, scope="module")
def _cpu_backend():
    with on_cpu_backend(), pytest.MonkeyPatch.context() as environment:
        environment.setenv("RANK", "0")
        environment.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        environment.syspath_prepend(CASES.parents[2] / "tests/support/stand_ins")
        yield


def without_graphs(case):
    """Return the arguments that affect the results."""
    others = "--cuda-graph-", "--moe-alltoall-capacity-factor"
    return {flag: value for flag, value in case.arguments.items() if not flag.startswith(others)}


@pytest.mark.parametrize("case", GRAPHED, ids=lambda case: case.name)
def test_graphed_case_differs_from_its_eager_one_in_graphs_only(case):
    eager = EVERY[case.equals]
    assert eager.graphs == "none"
    assert without_graphs(case) == without_graphs(eager)
    assert (case.ranks, case.on_cpu, case.environment) == (eager.ranks, eager.on_cpu, eager.environment)


def test_eager_case_equals_no_other():
    assert [case.name for case in EVERY.values() if case.graphs == "none" and case.equals] == []


def test_gpu_cases_bound_time_and_memory():
    bounded = {case.name: set(case.bounds) for case in EVERY.values() if not case.on_cpu}
    assert set(map(frozenset, bounded.values())) == {frozenset({"ms", "max_allocated_mib", "max_reserved_mib"})}


@pytest.mark.parametrize("case", [case for case in EVERY.values() if not case.on_cpu], ids=lambda case: case.name)
def test_megatron_accepts_the_flags_of_gpu_cases(case, monkeypatch):
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.training.arguments import parse_args, validate_args

    monkeypatch.setenv("WORLD_SIZE", str(case.ranks))
    monkeypatch.setattr(sys, "argv", ["train.py", *case.flags])
    args = validate_args(parse_args())
    unset_num_microbatches_calculator()
    assert args.cuda_graph_impl == case.graphs
    assert args.train_iters == case.steps


@pytest.mark.parametrize(("case", "file"), RECORDED, ids=lambda value: getattr(value, "name", ""))
def test_golden_values_equal_those_of_the_eager_case(case, file):
    graphed = json.loads(file.read_text())
    eager = json.loads((CASES / case.equals / file.name).read_text())
    assert {name: graphed[name] for name in NUMBERS} == {name: eager[name] for name in NUMBERS}
    assert len(graphed["lm loss"]) == case.steps
    assert graphed["graphs"] > 0
    assert eager["graphs"] == 0


def test_cpu_cases_have_golden_values():
    of_cpu = {
        case.name: [file.name for file in case.folder.glob("golden_values_*")] for case in EVERY.values() if case.on_cpu
    }
    assert len(of_cpu) >= 3
    assert set(map(tuple, of_cpu.values())) == {(f"golden_values_{CPU_BACKEND}.json",)}
