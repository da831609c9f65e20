"""Test which flags the benchmark results verify."""

import json

import pytest

from tests.support import verified


@pytest.mark.parametrize(
    ("case", "layout", "facts"),
    [
        ("dtype=bf16 fp8=delayed", "data parallel", {"--fp8-format", "--fp8-recipe delayed", "--bf16"}),
        ("dtype=bf16 modules=attn+mlp", "", {"--cuda-graph-modules attn", "--cuda-graph-modules mlp"}),
        ("dtype=bf16 config=recompute_granularity='full'+x=1", "", {"--recompute-granularity full"}),
        ("dtype=bf16 holds=model tied=False", "", {"--cuda-graph-layers-per-graph model"}),
        ("dtype=bf16", "EP2 with ETP2", {"--expert-model-parallel-size", "--expert-tensor-parallel-size"}),
        ("dtype=bf16 outer=None instances=2", "", {"--num-distributed-optimizer-instances"}),
    ],
)
def test_case_proves_its_flags(case, layout, facts):
    assert facts <= {*verified.of_case(case, layout)}


def test_case_does_not_prove_other_flags():
    found = {*verified.of_case("dtype=bf16 modules=attn tied=False outer=None", "EP2 with ETP2")}
    assert found.isdisjoint({"--cuda-graph-modules not given", "--tensor-model-parallel-size", "--fp16"})
    assert not any("--cuda-graph-layers-per-graph" in fact for fact in found)
    assert found.isdisjoint({"--untie-embeddings-and-output-weights not given", "--outer-dp-sharding-strategy"})


@pytest.mark.parametrize("wrapper", ["wrapper=ddp", "fsdp=False", "local=True wrapper=ddp"])
def test_case_without_megatron_fsdp_proves_nothing(wrapper):
    assert not [*verified.of_case(f"dtype=bf16 {wrapper}", "PP2")]


def test_variant_with_graphs_proves_its_flags():
    found = {*verified.of_variant("C:--fp8-recipe delayed", "native+grouped:X=1:--use-nccl-ub", "2 x NVIDIA H200")}
    expected = {"--fp8-recipe delayed", "--moe-use-grouped-tensor", "--use-nccl-ub", "--expert-model-parallel-size"}
    assert expected <= found
    assert not [*verified.of_variant("A:--fp16", "eager", "2 x NVIDIA H200")]
    assert not [*verified.of_variant("A:~--bf16", "native", "1 x NVIDIA H200")]


def test_cases_that_differ_or_failed_prove_nothing(tmp_path, monkeypatch):
    case = {"tests": "test_fsdp_graphs", "case": "dtype=fp16", "differences": [], "error": ""}
    cases = [case | {"differences": ["loss"]}, case | {"error": "failed"}, case | {"case": "control=dead_replay"}]
    monkeypatch.setattr(verified, "RESULTS", tmp_path)
    (tmp_path / "release").mkdir()
    file = tmp_path / "release" / "equality.json"
    file.write_text(json.dumps({"hardware": "1 x NVIDIA H100", "results": cases}))
    assert verified.facts_on("H100") == set()
    file.write_text(json.dumps({"hardware": "1 x NVIDIA H100", "results": [*cases, case]}))
    assert "--fp16" in verified.facts_on("H100")
    assert verified.facts_on("H200") == set()
