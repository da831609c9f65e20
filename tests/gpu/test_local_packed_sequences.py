"""Test local graphs of TransformerEngine's layers with packed sequences, on one GPU."""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformer_engine")

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.cuda_graphs import create_cudagraphs, delete_cuda_graphs
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.trainings.gpus import GPUS
from tests.unit_tests.core.transformer._cuda_graphs.local.test_packed_sequences import packed

pytestmark = pytest.mark.skipif(not GPUS, reason="needs a GPU")

TOKENS, HIDDEN = 128, 256
# Lengths of packed sequences, and their lengths with padding
LAYOUTS = [((30, 20, 60), (32, 32, 64)), ((64, 1, 31), (64, 32, 32)), ((10, 50, 40), (16, 64, 48))]
# Without this, cuDNN's attention backward differs between runs, with or without graphs.
ENVIRONMENT = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1"}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Initialize Megatron's process groups for one rank."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        torch.cuda.set_device(0)
        store = dist.FileStore(str(tmp_path_factory.mktemp("ranks") / "store"), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def train(graphs: bool) -> list[torch.Tensor]:
    """Train two seeded layers for one step per entry of ``LAYOUTS``; return outputs and gradients."""
    delete_cuda_graphs()
    initialize_rng_tracker(use_te_rng_tracker=True, force_reset=True)
    model_parallel_cuda_manual_seed(123)
    torch.manual_seed(123)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_backend=AttnBackend.fused,
        deterministic_mode=True,
        cuda_graph_impl="local" if graphs else "none",
        cuda_graph_warmup_steps=1,
    )
    model = TransformerBlock(config, get_gpt_layer_with_transformer_engine_spec()).cuda().train()
    for param in model.parameters():
        param.main_grad = torch.zeros_like(param)
    found = []
    for number, layout in enumerate(LAYOUTS):
        generator = torch.Generator().manual_seed(number)
        hidden = torch.randn(TOKENS, 1, HIDDEN, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
        params = packed(*layout, max_seqlen_q=TOKENS, max_seqlen_kv=TOKENS)
        out = model(hidden_states=hidden, attention_mask=None, packed_seq_params=params)
        out.float().square().mean().backward()
        create_cudagraphs()
        found.append(out.detach().clone())
        for param in model.parameters():  # graphs add to main gradients
            found.append(param.main_grad.clone() if param.grad is None else param.main_grad + param.grad)
            param.grad = None
            param.main_grad.zero_()
    delete_cuda_graphs()
    return found


@pytest.mark.usefixtures("one_rank")
def test_packed_sequences_of_other_lengths_are_bit_identical():
    with torch.cuda.stream(torch.cuda.Stream()):
        graphed, eager = train(graphs=True), train(graphs=False)
    assert [torch.equal(one, other) for one, other in zip(graphed, eager, strict=True)] == [True] * len(eager)
