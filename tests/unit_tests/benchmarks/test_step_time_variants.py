"""Test step_time.py: configurations and variants on the command line."""

import pytest

from benchmarks._step_time import configurations, variants


def configuration(text: str, ranks: int = 4):
    return configurations.configuration(text, ranks=ranks, steps=40, on_cpu=False)


def value(flags, name: str) -> str:
    """Return the last value of a flag, as argparse does."""
    return flags[len(flags) - list(flags)[::-1].index(name)]


def test_flags_after_a_configuration_override_it():
    found = configuration("A:--num-layers 3")
    assert found.name == "A:--num-layers 3"
    assert value(configuration("A").flags, "--num-layers") == "16"
    assert value(found.flags, "--num-layers") == "3"


@pytest.mark.parametrize(
    ("text", "ranks", "layout"),
    [
        ("A", 4, {}),
        ("C", 1, {}),
        ("C", 4, {"--expert-model-parallel-size": "2"}),
        ("C:--expert-model-parallel-size 4", 4, {"--expert-model-parallel-size": "4"}),
        ("C:--expert-model-parallel-size 1", 4, {}),
        ("B:--num-distributed-optimizer-instances 2", 4, {"--num-distributed-optimizer-instances": "2"}),
    ],
)
def test_layout_lists_flags_that_select_groups(text, ranks, layout):
    assert configuration(text, ranks).layout == layout


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
