"""What the command line names: models, ways to train them, and the order of the trainings."""

import pytest

from benchmarks._step_time import configurations, step_profile, variants
from benchmarks._step_time.plan import PROFILED_STEPS, plan


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


@pytest.mark.parametrize(("name", "batch"), [("B", "4"), ("D", "8")])
def test_a_step_has_as_many_micro_batches_for_each_rank(name, batch):
    flags = configuration(name, ranks=4).flags
    assert value(flags, "--global-batch-size") == batch
    assert value(flags, "--micro-batch-size") == "1"


@pytest.mark.parametrize(("asked", "ranks", "used"), [(2, 4, 2), (4, 2, 2), (4, 4, 4)])
def test_experts_are_spread_over_no_more_ranks_than_there_are(asked, ranks, used):
    found = configuration("C", ranks=ranks, expert_parallel=asked)
    assert found.expert_parallel == used
    assert value(found.flags, "--expert-model-parallel-size") == str(used)


def test_dense_models_spread_no_experts():
    assert configuration("A", expert_parallel=2).expert_parallel == 1
    assert "--expert-model-parallel-size" not in configuration("A").flags


def test_an_unknown_configuration_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match="--configurations: there is no 'E'; choose among A, B, C, D"):
        configuration("E:--num-layers 2")


@pytest.mark.parametrize("name", configurations.GPU_MODELS)
def test_a_description_says_what_is_trained_on_gpus(name):
    flags = configuration(name).flags
    sizes = [value(flags, f"--{size}") for size in ("num-layers", "hidden-size", "seq-length")]
    described = configurations.DESCRIPTIONS[name]
    assert described.startswith("{} layers, hidden {}, sequence {}".format(*sizes))
    assert ("--num-experts" in flags) == ("experts" in described)


@pytest.mark.parametrize("name", configurations.GPU_MODELS)
def test_models_for_the_cpu_differ_in_size_and_layers_only(name):
    gpu, cpu = configuration(name).flags, configuration(name, on_cpu=True).flags
    assert int(value(cpu, "--hidden-size")) <= 64
    assert (value(cpu, "--transformer-impl"), value(gpu, "--transformer-impl")) == ("local", "transformer_engine")
    for flag in "--global-batch-size", "--train-iters", "--lr", "--clip-grad":
        assert value(cpu, flag) == value(gpu, flag)


def test_variables_and_flags_after_a_variants_name_are_added():
    found = variants.variant("native:A=1,B=x=y:--seed 5")
    base = variants.VARIANTS["native"]
    assert found.name == "native:A=1,B=x=y:--seed 5"
    assert found.environment == {**base.environment, "A": "1", "B": "x=y"}
    assert found.flags == (*base.flags, "--seed", "5")
    assert found.references == base.references
    assert "A" not in base.environment


def test_flags_may_follow_without_variables():
    assert variants.variant("eager::--seed 5").flags[-2:] == ("--seed", "5")


def test_an_unknown_variant_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match="--variants: there is no 'fast'; choose among eager, native"):
        variants.variant("fast:A=1")


def test_a_variable_without_a_value_is_an_error():
    with pytest.raises(ValueError, match="is not NAME:VARIABLE=VALUE"):
        variants.variant("native:A")


def test_a_variants_flags_win_over_the_configurations():
    flags = variants.variant("native::--seed 5").flags_for(configuration("C:--seed 3"))
    assert value(flags, "--seed") == "5"


def test_only_graphs_of_layers_are_given_the_parts_of_a_moe_layer():
    moe, dense = configuration("C"), configuration("A")
    assert "--cuda-graph-modules" in variants.variant("native").flags_for(moe)
    for name, trained in ("eager", moe), ("full_iteration", moe), ("native", dense):
        assert "--cuda-graph-modules" not in variants.variant(name).flags_for(trained)


def test_one_graph_is_not_tried_where_the_host_must_know_shapes():
    assert "full_iteration" in variants.default_names(configuration("A"), on_cpu=False)
    names = variants.default_names(configuration("C"), on_cpu=False)
    assert {"native", "native+grouped"} <= {*names}
    assert not any(variants.variant(name).one_graph for name in names)


def test_experts_without_the_host_are_in_graphs_of_whole_layers():
    assert not any("grouped" in name for name in variants.default_names(configuration("A"), on_cpu=False))
    for name in "eager+grouped", "native+grouped":
        flags = variants.variant(name).flags_for(configuration("C"))
        assert "--moe-use-grouped-tensor" in flags
        assert "--cuda-graph-modules" not in flags


@pytest.mark.parametrize("name", ["compute_alone", "compute_alone+fused"])
def test_two_variants_train_without_collectives_and_with_whole_parameters_on_each_rank(name):
    assert all(each.communicates == ("alone" not in other) for other, each in variants.VARIANTS.items())
    alone = variants.variant(name)
    assert value(alone.flags, "--data-parallel-sharding-strategy") == "optim"
    assert value(alone.flags, "--cuda-graph-impl") == "full_iteration"
    assert ("--no-gradient-accumulation-fusion" in alone.flags_for(configuration("A"))) == ("fused" not in name)
    (run,) = plan([(configuration("A"), alone)], steps=40, profiled=False, top_python=3)
    assert not run.communicates


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


def test_additions_are_combined():
    both, fused = variants.variant("native+fused+optimizer"), variants.variant("native+fused")
    assert both.fuses_gradients
    assert both.flags == (*fused.flags, *variants.OPTIMIZER)


def test_an_unknown_addition_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match="--variants: there is no 'fast'; choose among checks, grouped"):
        variants.variant("native+fast")


def planned(profiled: bool = True):
    pairs = [(configuration("A"), variants.variant(name)) for name in ("eager", "native:A=1")]
    return plan(pairs, steps=40, profiled=profiled, top_python=3)


def test_all_times_are_taken_before_the_first_profile():
    runs = planned()
    assert [run.profiled for run in runs] == [False, False, True, True]
    assert [run.number for run in runs] == [0, 1, 2, 3]
    assert all(run.communicates for run in runs)
    assert len(planned(profiled=False)) == 2


def test_a_profiled_run_differs_in_where_it_ends_only():
    first, _, profile, _ = planned()
    assert profile.flags == [*first.flags, "--exit-interval", str(PROFILED_STEPS)]
    assert value(profile.flags, "--train-iters") == "40"


def test_a_profiled_run_ends_after_its_last_profiled_step():
    assert PROFILED_STEPS == step_profile.LAST


def test_only_graphs_of_layers_train_beside_the_default_stream():
    assert [run.side_stream for run in planned()] == [False, True, False, True]


def test_names_of_files_have_no_character_that_a_shell_or_a_folder_would_mind():
    assert planned()[1].file_name == "A-native_A=1"


@pytest.mark.parametrize("name", ["eager+fused", "native+fused", "full_iteration+fused"])
def test_gradients_are_fused_where_a_variant_says_so(name):
    unfused = variants.variant(name.removesuffix("+fused")).flags_for(configuration("A"))
    fused = variants.variant(name).flags_for(configuration("A"))
    at = unfused.index(configurations.NO_FUSION)
    assert fused == [*unfused[:at], *unfused[at + 1 :]]
    assert name not in variants.default_names(configuration("A"), on_cpu=False)


def test_tilde_removes_a_flag_and_its_values():
    flags = variants.variant("eager::~--data-parallel-sharding-strategy ~--fsdp-double-buffer").flags_for(
        configurations.Configuration("own", ("--num-layers", "2"))
    )
    assert not {"optim_grads_params", "--fsdp-double-buffer", "~--fsdp-double-buffer"}.intersection(flags)
    assert {"--num-layers", "2", "--use-megatron-fsdp"} <= set(flags)
