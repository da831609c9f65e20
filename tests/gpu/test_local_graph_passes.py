"""Test local graphs of TransformerEngine's layers on one GPU: packed sequences, and passes without gradients."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformer_engine")

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.cuda_graphs import create_cudagraphs, delete_cuda_graphs
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.trainings.gpus import GPUS

pytestmark = pytest.mark.skipif(not GPUS, reason="needs a GPU")

TOKENS, HIDDEN = 128, 256
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


@pytest.fixture
def block(one_rank):
    """Return a function that builds a seeded block of two layers, with or without graphs."""
    streams = torch.cuda.stream(torch.cuda.Stream())

    def make(graphs, dropout=0.0):
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
            hidden_dropout=dropout,
            attention_backend=AttnBackend.fused,
            deterministic_mode=True,
            cuda_graph_impl="local" if graphs else "none",
            cuda_graph_warmup_steps=1,
        )
        made = TransformerBlock(config, get_gpt_layer_with_transformer_engine_spec()).cuda().train()
        for param in made.parameters():
            param.main_grad = torch.zeros_like(param)
        return made

    with streams:
        yield make
        delete_cuda_graphs()


def hidden(number: int) -> torch.Tensor:
    """Return the hidden states of micro-batch ``number``, ``[TOKENS, 1, HIDDEN]``."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(TOKENS, 1, HIDDEN, generator=generator).to("cuda", torch.bfloat16)


def packed(lengths: tuple[int, ...], slots: tuple[int, ...]) -> PackedSeqParams:
    """Pack sequences of ``lengths``, each at the start of a slot."""
    real, padded = (torch.tensor([0, *each]).cumsum(0).int().cuda() for each in (lengths, slots))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=TOKENS,
        max_seqlen_kv=TOKENS,
        pad_between_seqs=True,
    )


def step(model: TransformerBlock, number: int, **kwargs) -> list[torch.Tensor]:
    """Run forward and backward; return the output and the gradients."""
    out = model(hidden_states=hidden(number).requires_grad_(), attention_mask=None, **kwargs)
    out.float().square().mean().backward()
    create_cudagraphs()
    found = [out.detach().clone()]
    for param in model.parameters():  # graphs add to main gradients
        found.append(param.main_grad.clone() if param.grad is None else param.main_grad + param.grad)
        param.grad = None
        param.main_grad.zero_()
    return found


def assert_equal(graphed: list[torch.Tensor], eager: list[torch.Tensor]) -> None:
    assert [torch.equal(one, other) for one, other in zip(graphed, eager, strict=True)] == [True] * len(eager)


def test_packed_sequences_of_other_lengths_are_bit_identical(block):
    layouts = [((30, 20, 60), (32, 32, 64)), ((64, 1, 31), (64, 32, 32)), ((10, 50, 40), (16, 64, 48))]

    def run(graphs):
        model = block(graphs)
        return [
            tensor
            for number, layout in enumerate(layouts)
            for tensor in step(model, number, packed_seq_params=packed(*layout))
        ]

    assert_equal(run(True), run(False))


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_passes_without_grad_between_steps_are_bit_identical(block, mode, dropout):
    def run(graphs):
        model, found = block(graphs, dropout), []
        for number in range(4):
            model.train(mode == "train")
            with torch.no_grad():
                for i in range(2):
                    found.append(model(hidden_states=hidden(100 * number + i), attention_mask=None).clone())
            create_cudagraphs()
            model.train()
            found += step(model, number)
        return found

    assert_equal(run(True), run(False))


def test_evaluation_runs_eagerly(block):
    model = block(True)
    step(model, 0)
    model.eval()
    with torch.no_grad(), mock.patch.object(MLP, "forward", autospec=True, side_effect=MLP.forward) as forward:
        for number in range(3):
            model(hidden_states=hidden(number), attention_mask=None)
    assert forward.call_count == 3 * len(model.layers)
