"""The flags that megatron-core does not have, and what a configuration has of them."""

import argparse
from types import SimpleNamespace

import pytest

from megatron.core.transformer._cuda_graphs.errors import OptionsError
from megatron.core.transformer._cuda_graphs.flags import own
from megatron.core.transformer._cuda_graphs.flags.own import (
    alltoall_capacity_factor,
    layers_per_graph,
    max_captures,
    packed_sequences,
)


def parsed(*flags):
    parser = own.add_arguments(argparse.ArgumentParser())
    parser.set_defaults(cuda_graph_impl="transformer_engine", use_megatron_fsdp=True)
    return parser.parse_args(flags)


def config(*flags):
    given = SimpleNamespace()
    own.give_to_config(parsed(*flags), given)
    return given


def test_by_default_errors_are_raised_and_nothing_is_said_of_layers():
    assert config().cuda_graph_fallback == "error"
    assert layers_per_graph(config()) is None
    assert layers_per_graph(SimpleNamespace()) is None
    assert max_captures(config()) == max_captures(SimpleNamespace()) == 8


def test_how_many_captures_there_are_may_be_given():
    own.check_arguments(parsed("--cuda-graph-max-captures", "1"))
    assert max_captures(config("--cuda-graph-max-captures", "3")) == 3


def test_a_number_of_captures_needs_graphs_that_are_captured_again():
    args = parsed("--cuda-graph-max-captures", "2")
    args.cuda_graph_impl = "local"
    with pytest.raises(ValueError, match=r"--cuda-graph-max-captures 2 needs .* transformer_engine, got local: leave"):
        own.check_arguments(args)


@pytest.mark.parametrize("value", ["0", "-1"])
def test_fewer_than_one_capture_is_refused(value):
    with pytest.raises(ValueError, match=f"--cuda-graph-max-captures must be 1 or more, .* got {value}"):
        own.check_arguments(parsed("--cuda-graph-max-captures", value))


def test_the_folder_of_reports():
    own.check_arguments(parsed("--cuda-graph-report", "folder"))
    assert config("--cuda-graph-report", "folder").cuda_graph_report == "folder"
    assert config().cuda_graph_report is None


@pytest.mark.parametrize("impl", ["none", "local"])
def test_a_report_needs_graphs_that_it_is_about(impl):
    args = parsed("--cuda-graph-report", "folder")
    args.cuda_graph_impl = impl
    with pytest.raises(ValueError, match=f"--cuda-graph-report folder needs .* transformer_engine, got {impl}: leave"):
        own.check_arguments(args)


@pytest.mark.parametrize(("value", "expected"), [("1", 1), ("all", "all"), ("model", "model")])
def test_layers_of_a_graph(value, expected):
    own.check_arguments(parsed("--cuda-graph-layers-per-graph", value))
    assert layers_per_graph(config("--cuda-graph-layers-per-graph", value)) == expected


def test_packed_sequences_are_for_graphs_and_for_eager_trainings_to_compare_with():
    args = parsed("--cuda-graph-packed-sequences", "3")
    for args.cuda_graph_impl in ("transformer_engine", "none"):
        own.check_arguments(args)
    args.cuda_graph_impl = "local"
    with pytest.raises(ValueError, match=r"--cuda-graph-packed-sequences 3 needs .* got local: leave"):
        own.check_arguments(args)


def test_packed_sequences_from_the_flag():
    assert packed_sequences(config("--cuda-graph-packed-sequences", "3")) == 3
    assert packed_sequences(config()) is None
    assert packed_sequences(SimpleNamespace()) is None
    with pytest.raises(ValueError, match="--cuda-graph-packed-sequences must be a positive number of sequences, got 0"):
        own.check_arguments(parsed("--cuda-graph-packed-sequences=0"))


def test_grouped_experts_need_no_graphs():
    args = parsed("--moe-use-grouped-tensor")
    for args.cuda_graph_impl in ("none", "local", "transformer_engine", "full_iteration"):
        own.check_arguments(args)
    assert own.grouped_tensor(config("--moe-use-grouped-tensor"))
    assert not own.grouped_tensor(config())
    assert not own.grouped_tensor(SimpleNamespace())


def test_whoever_makes_a_configuration_may_give_a_number():
    assert layers_per_graph(SimpleNamespace(cuda_graph_layers_per_graph=1)) == 1


@pytest.mark.parametrize("value", ["0", "-1", "2", "12", "two", "1.0", "", " ", "Model"])
def test_other_numbers_of_layers_are_refused(value):
    words = f"^--cuda-graph-layers-per-graph {value} is not supported: use all, model or 1$"
    with pytest.raises(OptionsError, match=words):
        own.check_arguments(parsed(f"--cuda-graph-layers-per-graph={value}"))
    with pytest.raises(OptionsError, match=words):
        layers_per_graph(SimpleNamespace(cuda_graph_layers_per_graph=value))


@pytest.mark.parametrize(
    ("other", "needed"),
    [
        ({"use_megatron_fsdp": False}, "needs --use-megatron-fsdp: leave it out"),
        ({"cuda_graph_impl": "local"}, "1 needs --cuda-graph-impl transformer_engine, got local: leave it out"),
    ],
)
def test_layers_of_a_graph_need_graphs_that_they_are_about(other, needed):
    args = parsed("--cuda-graph-layers-per-graph", "1")
    own.check_arguments(args)
    vars(args).update(other)
    with pytest.raises(ValueError, match=f"^--cuda-graph-layers-per-graph {needed}$"):
        own.check_arguments(args)


def test_an_unknown_fallback_of_a_configuration_is_refused():
    with pytest.raises(OptionsError, match=r"--cuda-graph-fallback must be one of \('error', 'eager'\), got 'none'"):
        own.check_values(SimpleNamespace(cuda_graph_fallback="none"))


def test_a_configuration_has_every_flag():
    assert vars(config()) == {
        "cuda_graph_fallback": "error",
        "cuda_graph_layers_per_graph": None,
        "cuda_graph_packed_sequences": None,
        "cuda_graph_max_captures": 8,
        "cuda_graph_report": None,
        "moe_use_grouped_tensor": False,
        "moe_alltoall_capacity_factor": None,
    }


def test_a_capacity_factor_is_a_share_and_works_without_graphs():
    args = parsed("--moe-alltoall-capacity-factor", "1.25")
    for args.cuda_graph_impl in ("none", "transformer_engine"):
        own.check_arguments(args)
    assert alltoall_capacity_factor(args) == 1.25
    assert alltoall_capacity_factor(SimpleNamespace()) is None


@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_a_capacity_factor_of_nothing_is_refused(value):
    with pytest.raises(OptionsError, match=f"--moe-alltoall-capacity-factor must be above 0, .* got {value}"):
        own.check_arguments(parsed("--moe-alltoall-capacity-factor", value))
