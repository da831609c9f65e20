"""Test step_time.py: configurations and variants on the command line."""

import pytest

from benchmarks._step_time import configurations, variants


def configuration(text: str, ranks: int = 4, expert_parallel: int = 2, on_cpu: bool = False):
    return configurations.configuration(text, ranks=ranks, steps=40, expert_parallel=expert_parallel, on_cpu=on_cpu)


def value(flags, name: str) -> str:
    """Return the last value of a flag, as argparse does."""
    return flags[len(flags) - list(flags)[::-1].index(name)]


def test_flags_after_a_configuration_override_it():
    found = configuration("A:--num-layers 3")
    assert found.name == "A:--num-layers 3"
    assert value(configuration("A").flags, "--num-layers") == "16"
    assert value(found.flags, "--num-layers") == "3"


@pytest.mark.parametrize(("asked", "ranks", "used"), [(2, 4, 2), (4, 2, 2), (4, 4, 4)])
def test_expert_parallel_size_is_at_most_the_ranks(asked, ranks, used):
    found = configuration("C", ranks=ranks, expert_parallel=asked)
    assert found.expert_parallel == used
    assert value(found.flags, "--expert-model-parallel-size") == str(used)


def test_variables_and_flags_follow_the_variant():
    found = variants.variant("native:A=1,B=x=y:--seed 5")
    base = variants.VARIANTS["native"]
    assert found.name == "native:A=1,B=x=y:--seed 5"
    assert found.environment == {**base.environment, "A": "1", "B": "x=y"}
    assert found.flags == (*base.flags, "--seed", "5")
    assert found.references == base.references
    assert "A" not in base.environment


def test_flags_of_variants_override_configurations():
    flags = variants.variant("native::--seed 5").flags_for(configuration("C:--seed 3"))
    assert value(flags, "--seed") == "5"


@pytest.mark.parametrize(
    ("name", "references"),
    [
        ("native", ("eager",)),
        ("native+fused", ("eager+fused",)),
        ("native+checks", ("eager+checks", "eager")),
        ("native+fused+grouped:A=1:--seed 5", ("eager+fused+grouped",)),
        ("ddp_graphs+grouped", ("ddp+grouped",)),
        ("compute_alone+fused", ()),
    ],
)
def test_references_have_the_same_additions(name, references):
    assert variants.variant(name).references == references
    for each in references:
        variants.variant(each)


def test_tilde_removes_a_flag_and_its_values():
    flags = variants.variant("eager::~--data-parallel-sharding-strategy ~--fsdp-double-buffer").flags_for(
        configurations.Configuration("own", ("--num-layers", "2"))
    )
    assert not {"optim_grads_params", "--fsdp-double-buffer", "~--fsdp-double-buffer"}.intersection(flags)
    assert {"--num-layers", "2", "--use-megatron-fsdp"} <= set(flags)
