"""Build pipeline stages of simple layers, and capture them."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.transformer._cuda_graphs.agreement import CaptureAgreement
from megatron.core.transformer._cuda_graphs.errors import CaptureFailedError
from megatron.core.transformer._cuda_graphs.te import capture_arguments, capture_state
from megatron.core.transformer._cuda_graphs.te.capture_arguments import PassOrder, engine_arguments, layer_samples
from megatron.core.transformer._cuda_graphs.te.capture_state import CaptureScope, CaptureState, Holds
from megatron.core.transformer._cuda_graphs.te.stage import Chunk, Role, Stage
from megatron.core.transformer._cuda_graphs.te.training_calls import TrainingCalls
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import GraphableMegatronModule
from tests.support.trainings import models
from tests.support.trainings.case import Case


class Failure(Exception):
    """An exception that makes a capture fail."""


class Alone(CaptureAgreement):
    """A ``CaptureAgreement`` for a single rank, without a process group."""

    def __init__(self):
        self._of_stage = self._ballots = self._open = []

    def _vote(self, ballots, blockers=None):
        return dict(blockers or {})

    def blockers(self, own):
        return dict(own)

    def _failed(self, error):
        return CaptureFailedError(f"{type(error).__name__}")


class MaskedLayer(GraphableMegatronModule):
    """A layer that doubles its input and adds its attention mask."""

    def __init__(self, attn_mask_type=AttnMaskType.causal):
        torch.nn.Module.__init__(self)
        self.config = config()
        self.self_attention = torch.nn.Identity()
        self.self_attention.attn_mask_type = attn_mask_type
        self.cuda_graphs = []

    def get_layer_static_inputs(self, seq_length, micro_batch_size):
        hidden_states = torch.zeros(seq_length, micro_batch_size, 4, device="cuda", requires_grad=True)
        return {"hidden_states": hidden_states, "attention_mask": torch.ones(1, device="cuda")}

    def forward(self, hidden_states, attention_mask=None):
        return hidden_states * 2 + attention_mask


def config(**changes):
    return SimpleNamespace(
        **{
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": [],
            "cuda_graph_retain_backward_graph": False,
            "cuda_graph_warmup_steps": 10,
            "delay_wgrad_compute": False,
            "fp4": None,
            "fp8": None,
            "gradient_accumulation_fusion": False,
            "overlap_moe_expert_parallel_comm": False,
            "recompute_granularity": None,
            "sequence_parallel": False,
            **changes,
        }
    )


def stage_of(*layers, modules=None, stages=1, **options):
    """Return a pipeline stage with one model chunk per list of layers."""
    alone = SimpleNamespace(size=lambda: 1)
    groups = SimpleNamespace(tp=alone, dp_cp=alone, pp=SimpleNamespace(size=lambda: stages))
    modules = modules or [torch.nn.Module() for _ in layers]
    chunks = [Chunk(module, None, own) for module, own in zip(modules, layers, strict=True)]
    return Stage(config(**options), groups, None, chunks, Role())


def capture(stage, order, engine=capture_state.make_graphed_callables):  # type: ignore[attr-defined]
    """Capture the layers of ``stage`` for one micro-batch, in the order of passes ``order``."""
    graphs = CaptureState(stage, TrainingCalls(()))
    graphs.scope = CaptureScope(Holds.LAYER)
    passes = PassOrder(order, [len(chunk.layers) for chunk in stage.chunks])

    def input_data():
        args, kwargs = zip(*layer_samples(stage, passes.plan, 2, 1), strict=True)
        return list(args), engine_arguments(stage, passes, kwargs)

    with mock.patch.object(capture_arguments, "get_num_microbatches", return_value=1), using(engine):
        graphs.capture(Alone(), (2, 1), input_data)
    return graphs


def engine(capture=lambda: None):
    """Return a stand-in for ``make_graphed_callables`` that calls ``capture`` and returns mock graphs."""

    def run(layers, sample_args, **arguments):
        capture()
        graph = mock.Mock(**{"pool.return_value": (1, 1)})
        return [mock.Mock(spec=["reset", "name_inputs"], forward_graph=graph) for _ in sample_args]

    return run


def using(engine):
    """Return a patch that captures layers with ``engine``."""
    return mock.patch.object(capture_state, "make_graphed_callables", engine)


class CountingChunk(torch.nn.Module):
    """A chunk of ``layers`` that counts how often its gradients are zeroed."""

    def __init__(self, layers):
        super().__init__()
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(layers)
        self.resets = 0

    def forward(self, hidden_states):
        return hidden_states

    def zero_grad_buffer(self):
        self.resets += 1


def helper_of(capture=lambda: None, layers=1, kind=TECudaGraphHelper, **options):
    """Return a helper for simple layers; instead of capturing graphs, the helper calls ``capture``."""
    chunk = CountingChunk([MaskedLayer() for _ in range(layers)])
    real = models.transformer_config(Case(layers=2, holds="layer"), True)
    vars(real).update(options)
    made = kind([chunk], real, 32, 1)
    made._capture = using(engine(capture))(made._capture)
    return made


@contextmanager
def first_of_stages(count: int, microbatches: int) -> Iterator[None]:
    """Make this process the first of ``count`` pipeline stages, without communication, while in this context."""
    from megatron.core import parallel_state

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=count, create_gloo_process_groups=False)
    set_microbatches(microbatches)
    try:
        yield
    finally:
        set_microbatches(None)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def set_microbatches(count: int | None) -> None:
    """Set the number of micro-batches per step, or unset it if ``count`` is None."""
    from megatron.core import num_microbatches_calculator

    num_microbatches_calculator.unset_num_microbatches_calculator()
    if count is not None:
        num_microbatches_calculator.init_num_microbatches_calculator(0, None, count, 1, 1)
