"""evaluation: what prevents graphs for evaluation, and the shapes that they are captured for."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer._cuda_graphs.te.evaluation import evaluation_blocker, shape_of_call
from megatron.core.transformer.enums import CudaGraphModule


def config(**changes):
    plain: dict[str, object] = {
        "fp8": None,
        "fp4": None,
        "fp8_param": False,
        "delay_wgrad_compute": False,
        "fine_grained_activation_offloading": False,
        "cuda_graph_modules": [],
        "recompute_granularity": None,
        "mlp_chunks_for_training": 1,
    }
    return SimpleNamespace(**plain | changes)


def blocker(whole=False, **changes):
    return evaluation_blocker(config(**changes), whole)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute_granularity": "selective"},
        {"cuda_graph_modules": [CudaGraphModule.moe_router]},
        {"fp8": "hybrid"},
    ],
    ids=["layers", "recompute", "router", "FP8"],
)
def test_evaluation_can_have_graphs(changes):
    assert blocker(**changes) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fp8": "hybrid", "fp8_param": True}, "--fp8-param-gather"),
        ({"cuda_graph_packed_sequences": 4}, "packed"),
        ({"fp4": "e2m1"}, "FP4"),
        ({"delay_wgrad_compute": True}, "--delay-wgrad-compute"),
        ({"fine_grained_activation_offloading": True}, "offloaded"),
        ({"cuda_graph_modules": [CudaGraphModule.moe_router], "recompute_granularity": "selective"}, "MoE"),
        ({"cuda_graph_modules": [CudaGraphModule.moe_router], "mlp_chunks_for_training": 2}, "MoE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_reason_is_named_where_it_cannot(changes, reason):
    assert reason in blocker(**changes)
    of_layers = {"fp8_param", "cuda_graph_packed_sequences"} & changes.keys()
    assert blocker(whole=True, **changes) == ("" if of_layers else blocker(**changes))


TOKENS = torch.zeros(2, 8, dtype=torch.int64)


def language_model(kind=GPTModel, ranks=1):
    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(context_parallel_size=ranks)
    return model


@pytest.mark.parametrize(("args", "kwargs"), [((TOKENS, None, None), {}), ((), {"input_ids": TOKENS})])
def test_a_call_shows_tokens_of_all_context_parallel_ranks_and_sequences(args, kwargs):
    assert shape_of_call(language_model(), args, kwargs) == (8, 2)
    assert shape_of_call(language_model(ranks=4), args, kwargs) == (32, 2)


@pytest.mark.parametrize(("sequence_parallel", "tokens"), [(False, 8), (True, 16)])
def test_hidden_states_show_them_to_a_later_pipeline_stage(sequence_parallel, tokens):
    model = language_model(ranks=4)
    model.pre_process = False
    model.decoder = SimpleNamespace(input_tensor=torch.zeros(8, 2, 4))
    model.config = SimpleNamespace(
        context_parallel_size=4, tensor_model_parallel_size=2, sequence_parallel=sequence_parallel
    )
    assert shape_of_call(model, (None, None, None), {}) == (4 * tokens, 2)


def test_a_call_with_embeddings_does_not_show_them():
    assert shape_of_call(language_model(), (), {"input_ids": None, "decoder_input": torch.zeros(8, 2, 4)}) is None


def test_a_model_that_may_add_to_its_tokens_does_not_show_them():
    class Captioner(GPTModel):
        def forward(self, input_ids, images):
            pass

    assert shape_of_call(language_model(Captioner), (TOKENS, None), {}) is None
