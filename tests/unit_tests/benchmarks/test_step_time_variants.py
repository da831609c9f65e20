"""What the command line names: models, ways to train them, and the order of the trainings."""

import pytest

from benchmarks._step_time import configurations, variants


def configuration(text: str, ranks: int = 4, expert_parallel: int = 2, on_cpu: bool = False):
    return configurations.configuration(text, ranks=ranks, steps=40, expert_parallel=expert_parallel, on_cpu=on_cpu)


def value(flags, name: str) -> str:
    """What argparse takes of ``flags``: the last."""
    return flags[len(flags) - list(flags)[::-1].index(name)]


def test_flags_after_a_configurations_name_win():
    found = configuration("A:--num-layers 3")
    assert found.name == "A:--num-layers 3"
    assert value(configuration("A").flags, "--num-layers") == "16"
    assert value(found.flags, "--num-layers") == "3"


@pytest.mark.parametrize(("asked", "ranks", "used"), [(2, 4, 2), (4, 2, 2), (4, 4, 4)])
def test_experts_are_spread_over_no_more_ranks_than_there_are(asked, ranks, used):
    found = configuration("C", ranks=ranks, expert_parallel=asked)
    assert found.expert_parallel == used
    assert value(found.flags, "--expert-model-parallel-size") == str(used)


def test_variables_and_flags_after_a_variants_name_are_added():
    found = variants.variant("native:A=1,B=x=y:--seed 5")
    base = variants.VARIANTS["native"]
    assert found.name == "native:A=1,B=x=y:--seed 5"
    assert found.environment == {**base.environment, "A": "1", "B": "x=y"}
    assert found.flags == (*base.flags, "--seed", "5")
    assert found.references == base.references
    assert "A" not in base.environment


def test_an_unknown_variant_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match="--variants: there is no 'fast'; choose among eager, native"):
        variants.variant("fast:A=1")


def test_a_variants_flags_win_over_the_configurations():
    flags = variants.variant("native::--seed 5").flags_for(configuration("C:--seed 3"))
    assert value(flags, "--seed") == "5"


def test_only_graphs_of_layers_are_given_the_parts_of_a_moe_layer():
    moe, dense = configuration("C"), configuration("A")
    assert "--cuda-graph-modules" in variants.variant("native").flags_for(moe)
    for name, trained in ("eager", moe), ("full_iteration", moe), ("native", dense):
        assert "--cuda-graph-modules" not in variants.variant(name).flags_for(trained)


@pytest.mark.parametrize(
    ("name", "references"),
    [
        ("native", ("eager",)),
        ("native+fused", ("eager+fused",)),
        ("native+checks", ("eager+checks", "eager")),
        ("native+optimizer", ("eager+optimizer", "full_iteration+optimizer")),
        ("native+fused+optimizer:A=1:--seed 5", ("eager+fused+optimizer", "full_iteration+fused+optimizer")),
        ("ddp_graphs+grouped", ("ddp+grouped",)),
        ("compute_alone+fused", ()),
    ],
)
def test_a_variant_must_equal_one_with_the_same_additions(name, references):
    assert variants.variant(name).references == references
    for each in references:
        variants.variant(each)


def test_tilde_removes_a_flag_and_its_values():
    flags = variants.variant("eager::~--data-parallel-sharding-strategy ~--fsdp-double-buffer").flags_for(
        configurations.Configuration("own", ("--num-layers", "2"))
    )
    assert not {"optim_grads_params", "--fsdp-double-buffer", "~--fsdp-double-buffer"}.intersection(flags)
    assert {"--num-layers", "2", "--use-megatron-fsdp"} <= set(flags)
