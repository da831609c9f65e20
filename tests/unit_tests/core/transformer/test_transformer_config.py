"""Test that TransformerConfig allows full recomputation with graphs, after megatron-core's checks."""

import pytest

from megatron.core.transformer import MLATransformerConfig, TransformerConfig

SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
GRAPHS = {"cuda_graph_impl": "transformer_engine"}


@pytest.mark.parametrize("kind", [TransformerConfig, MLATransformerConfig])
def test_full_recomputation_is_allowed_with_graphs(kind):
    with_graphs, without = (kind(**SIZES, **FULL, **graphs) for graphs in (GRAPHS, {}))
    values = {name: value for name, value in vars(without).items() if not callable(value)}
    assert with_graphs.recompute_granularity == "full"
    assert {name for name in values if vars(with_graphs)[name] != values[name]} == {"cuda_graph_impl"}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"recompute_method": None}, "recompute_method must be"),
        ({"cpu_offloading": True}, "CPU offloading"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_recomputation_is_checked_as_without_graphs(changes, error):
    for graphs in (GRAPHS, {}):
        with pytest.raises(ValueError, match=error):
            TransformerConfig(**{**SIZES, **FULL, **graphs, **changes})
