"""Trains a small model, eagerly or with CUDA graphs, and keeps the numbers that two runs are compared by.

The model is under Megatron-FSDP, or under DistributedDataParallel with the distributed optimizer and, if asked for, in
pipeline stages. The code is written for ``torch.cuda``; on CPU ranks it runs once the CPU backend is installed.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

VOCABULARY = 128
YARN = {
    "yarn_rotary_scaling_factor": 2.0,
    "yarn_original_max_position_embeddings": 16,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
EVALUATION = 10_000  # the batches of evaluations are those of this step and the ones after it
LAYERS_VARIABLE = "MEGATRON_CUDA_GRAPH_LAYERS_PER_GRAPH"


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        vision: Whether the model is a vision encoder (``vision_training``) rather than a GPT.
        captions: Whether the GPT reads the features of a vision encoder too, and both have graphs.
        pattern: ``--hybrid-layer-pattern`` of a hybrid model (``hybrid_training``) rather than a GPT; says ``layers``
            and ``mtp`` too.
        dtype: ``fp32``, ``bf16`` or ``fp16``; the last with a dynamic loss scale that is too great at first.
        dropout: Probability of hidden and attention dropout.
        microbatches: Micro-batches in a step.
        microbatches_later: Micro-batches from the second step after capture on; 0 for no change.
        modules: ``cuda_graph_modules``; empty for whole layers.
        layers_per_graph: At most so many whole layers in a graph; 0 for all of them, -1 for the whole model, None for
            what is the default.
        experts: MoE experts; 0 for a dense model.
        moe_layer_freq: 1 for experts in every layer, or 1 and 0 for layers with and without.
        shared_experts: Hidden size of the shared experts; 0 for none.
        shared_overlap: Whether shared experts run beside the dispatch of tokens.
        ep_overlap: Whether the tokens of one micro-batch travel between experts while another one is computed.
        delay_wgrad: Whether weight gradients are computed in passes of their own; with ``ep_overlap``.
        capacity: Tokens of an expert relative to an even share; tokens beyond it are dropped, missing ones padded. None
            for as many as the router sends.
        transformer_engine: Whether layers are TransformerEngine's rather than Megatron's own.
        fsdp: Whether the model is under Megatron-FSDP rather than DistributedDataParallel.
        torch_fsdp: Whether it is under torch's FSDP2 rather than either.
        reshard: Whether FSDP2 frees gathered parameters between forward and backward.
        overlap_param_gather: Whether parameters are gathered where forward needs them, rather than by the optimizer.
        mtp: Layers of multi-token prediction.
        virtual: Model chunks of each pipeline stage; None where the pipeline does not interleave chunks.
        bucket: Parameters in a gradient bucket of DistributedDataParallel; few, so that a model has several.
        positions: ``position_embedding_type``.
        packed: Sequences of random lengths that are packed in a micro-batch, at most; 0 for one row for each.
        latent_attention: Whether attention is multi-latent, which needs TransformerEngine.
        tied: Whether the output layer has the embedding's weights.
        strategy: Megatron-FSDP's sharding strategy.
        double_buffer: Whether parameters are gathered to, and gradients reduced from, fixed buffers.
        unchecked: Whether graphs are attempted without what Megatron-FSDP needs for them.
        fp8_params: Whether parameters are kept, and gathered, in FP8; with ``fp8``.
        nccl_ub: Whether Megatron-FSDP's buffers are registered with NCCL.
        layers, hidden, sequence, micro_batch: Sizes.
        sequences_later: Sequence lengths that take turns from the second step after capture on; empty for no change.
        evaluates: Whether an evaluation follows the step after capture.
        evaluates_often: Whether evaluations come right before capture, right after it, and after each step.
        evaluated_sequence: How many tokens the sequences of evaluation have; 0 for as many as in training.
        micro_batches_later: The same for sequences in a micro-batch.
        turn: Steps that each of these lasts.
        later_on_one_rank: Whether they are those of the last data-parallel rank only.
        max_captures: How many times graphs are captured, as shapes or numbers of micro-batches change.
        optimizer_graph: Whether the optimizer's step is captured too; eager runs get the same optimizer.
        local: Whether graphs are those of ``cuda_graph_impl="local"``: the first step is recorded.
        steps: Optimizer steps.
        warmup: Steps before capture; with ``local`` how often each layer runs before its capture.
    """

    vision: bool = False
    captions: bool = False
    pattern: str = ""
    dtype: str = "fp32"
    dropout: float = 0.0
    microbatches: int = 1
    microbatches_later: int = 0
    modules: tuple[str, ...] = ()
    layers_per_graph: int | None = 0
    experts: int = 0
    moe_layer_freq: int | tuple[int, ...] = 1
    shared_experts: int = 0
    shared_overlap: bool = False
    ep_overlap: bool = False
    delay_wgrad: bool = False
    capacity: float | None = None
    transformer_engine: bool = False
    fsdp: bool = True
    torch_fsdp: bool = False
    reshard: bool = True
    overlap_param_gather: bool = True
    mtp: int = 0
    virtual: int | None = None
    bucket: int = 10_000
    positions: str = "rope"
    packed: int = 0
    latent_attention: bool = False
    tied: bool = True
    strategy: str = "optim_grads_params"
    double_buffer: bool = True
    unchecked: bool = False
    sequence_parallel: bool = False
    recompute: tuple[str, ...] = ()
    fused_wgrad: bool = False
    fp8: str | None = None
    fp8_params: bool = False
    nccl_ub: bool = False
    layers: int = 4
    hidden: int = 64
    heads: int = 4
    sequence: int = 32
    micro_batch: int = 2
    sequences_later: tuple[int, ...] = ()
    micro_batches_later: tuple[int, ...] = ()
    turn: int = 1
    later_on_one_rank: bool = False
    max_captures: int = 8
    evaluates: bool = False
    evaluates_often: bool = False
    evaluated_sequence: int = 0
    optimizer_graph: bool = False
    local: bool = False
    steps: int = 12
    warmup: int = 3

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype]

    def microbatches_of(self, step: int) -> int:
        """How many micro-batches ``step`` has."""
        return self.microbatches_later or self.microbatches if step > self.warmup else self.microbatches

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that say how many layers a graph holds."""
        most = self.layers_per_graph
        return {} if most is None else {LAYERS_VARIABLE: {0: "all", -1: "model"}.get(most, str(most))}

    def sequence_of(self, step: int) -> int:
        """How many tokens the sequences of ``step`` have."""
        if step >= EVALUATION:
            return self.evaluated_sequence or self.sequence
        return self._taking_turns(self.sequences_later, step) or self.sequence

    def micro_batch_of(self, step: int) -> int:
        """How many sequences the micro-batches of ``step`` have."""
        return self._taking_turns(self.micro_batches_later, step) or self.micro_batch

    def _taking_turns(self, later: tuple[int, ...], step: int) -> int:
        since = step - self.warmup - 1
        return later[since // self.turn % len(later)] if later and since >= 0 else 0

    def __str__(self) -> str:
        changed = [
            f"{each.name}={getattr(self, each.name)}"
            for each in dataclasses.fields(self)
            if getattr(self, each.name) != each.default
        ]
        return " ".join(changed) or "default"


@dataclass
class Trace:
    """What a run computed on this rank.

    Attributes:
        losses: Per step, the mean loss over micro-batches and data-parallel ranks, on every rank.
        grad_norms: Per step; -1 where the optimizer skipped it.
        shards: What the optimizer owns at the end, in its order: local shards of the parameters.
        graphs: How many layer graphs there were.
        step_replays: Per step, how often CUDA graphs of layers were replayed.
        evaluations: The losses of each micro-batch of each evaluation.
        evaluation_replays: For each evaluation how often graphs of layers for evaluation were replayed.
    """

    losses: list[float]
    grad_norms: list[float]
    shards: list[torch.Tensor]
    graphs: int = 0
    step_replays: list[int] = field(default_factory=list)
    evaluations: list[list[float]] = field(default_factory=list)
    evaluation_replays: list[int] = field(default_factory=list)

    @property
    def replays(self) -> int:
        """How often CUDA graphs of layers were replayed in the last step."""
        return self.step_replays[-1]

    def differences(self, other: "Trace") -> list[str]:
        """Say where ``other`` differs, bit for bit; empty if nowhere."""
        found = []
        for what in ("losses", "grad_norms", "evaluations"):
            for step, (mine, theirs) in enumerate(zip(getattr(self, what), getattr(other, what), strict=True)):
                if mine != theirs:
                    found.append(f"{what}[{step}]: {mine!r} and {theirs!r}")
        for index, (mine, theirs) in enumerate(zip(self.shards, other.shards, strict=True)):
            if not torch.equal(mine, theirs):
                found.append(f"shard {index}: {(mine != theirs).sum().item()} of {mine.numel()} elements")
        return found


class Training:
    """A model with its optimizer, ready to train. Model-parallel groups must stand.

    Attributes:
        chunks: The model's chunks of this pipeline stage, wrapped.
    """

    def __init__(self, case: Case, graphs: bool):
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        self.case = case
        # their tensors have an element for each layer of the model before
        destroy_moe_metrics_tracker()
        MTPLossLoggingHelper.tracker.clear()
        parallel_state.set_virtual_pipeline_model_parallel_world_size(case.virtual)
        torch.manual_seed(1234)
        model_parallel_cuda_manual_seed(
            1234, te_rng_tracker=case.transformer_engine, use_cudagraphable_rng=True, force_reset_rng=True
        )
        self._set_microbatches(0)
        self.config = _config(case, graphs)
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            self.chunks = self._wrapped_chunks()
            self.optimizer = _optimizer(case, self.chunks)
        self.helper: Any = None
        self.patches = ExitStack()  # closed when the training is over
        self._connect()
        if case.optimizer_graph:
            self._capture_optimizer(graphs)
        self._gather_in_hooks(False)
        self.taken: list[torch.Tensor] = []  # memory that a control keeps from everyone else
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.replayed: list[Any] = []  # CUDA graphs, in the last step
        self.evaluations: list[list[float]] = []
        self.evaluation_replays: list[int] = []
        self.step_replays: list[int] = []  # of layers, in each step

    def _set_microbatches(self, step: int) -> None:
        from megatron.core import num_microbatches_calculator as calculator
        from megatron.core import parallel_state

        calculator.unset_num_microbatches_calculator()
        ranks = parallel_state.get_data_parallel_world_size()
        size, count = self.case.micro_batch_of(step), self.case.microbatches_of(step)
        calculator.init_num_microbatches_calculator(0, None, size * ranks * count, size, ranks)

    def _wrapped_chunks(self) -> list[torch.nn.Module]:
        wrap = _under_torch_fsdp if self.case.torch_fsdp else _under_fsdp if self.case.fsdp else _under_ddp
        stages = [None] if self.case.virtual is None else range(self.case.virtual)
        return [wrap(self.case, self.config, self._unwrapped_chunk(stage)) for stage in stages]

    def _unwrapped_chunk(self, virtual_stage: int | None) -> torch.nn.Module:
        return _gpt(self.case, self.config, virtual_stage)

    def _connect(self) -> None:
        """Set the functions that megatron.training sets for the schedules."""
        from megatron.core.distributed import finalize_model_grads

        self.config.no_sync_func = self._of_chunks("no_sync")
        if not self.case.fsdp:
            self.config.grad_sync_func = self._of_chunks("start_grad_sync")
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

    def _capture_optimizer(self, graphs: bool) -> None:
        """Let the optimizer's step be a graph after ``case.warmup`` steps, or only be able to be one."""
        from megatron.core.optimizer import optimizer_cuda_graph

        from .capturable import capturable_on_this_device

        self.patches.enter_context(capturable_on_this_device())
        wrapper = optimizer_cuda_graph.OptimizerCudaGraphWrapper
        steps = self.case.warmup if graphs else self.case.steps
        wrapper.curr_iteration = 0
        self.optimizer.step = wrapper(self.optimizer.step, cuda_graph_warmup_steps=steps)
        self.patches.callback(vars(self.optimizer).pop, "step")

    def _of_chunks(self, method: str) -> Callable | list[Callable]:
        methods = [getattr(chunk, method) for chunk in self.chunks]
        return methods[0] if len(methods) == 1 else methods

    def _gather_in_hooks(self, on: bool, param_sync: bool = False) -> None:
        """Turn gathering parameters where forward or a replay needs them on or off.

        megatron.training has it off in the first step, at capture and in evaluation.

        Args:
            on: Whether to turn it on.
            param_sync: Whether to gather all parameters when it is turned off.
        """
        if self.case.fsdp or not self.case.overlap_param_gather:
            return
        for chunk in self.chunks:
            if on:
                chunk.enable_forward_pre_hook()
            else:
                chunk.disable_forward_pre_hook(param_sync=param_sync)
        if self.case.virtual is not None:
            self.config.param_sync_func = self._of_chunks("start_param_sync") if on else None
        if on and self.helper is not None and self.helper.graphs_created():
            self.helper.cuda_graph_set_manual_hooks()

    def _batches(self, step: int) -> Iterator[Any]:
        return _batches(self.case, step)

    def _losses(self, model: Callable[..., Any], batch: Any) -> Any:
        """Call ``model``, the model or what plans its passes, on ``batch``."""
        packed = {"packed_seq_params": batch.packed} if self.case.packed else {}
        return model(batch.tokens, batch.positions, batch.mask, labels=batch.labels, **packed)

    def _forward_step(self, batches: Iterator[Any], model: torch.nn.Module, return_schedule_plan: bool = False):
        def loss_of(losses):
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}

        return self._losses(model.build_schedule_plan if return_schedule_plan else model, next(batches)), loss_of

    def make_helper(self) -> Any:
        from megatron.core.transformer._cuda_graphs.te import helper as te_helper
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        check = mock.patch.object(te_helper, "check_fsdp_options")
        environment = mock.patch.dict(os.environ, self.case.environment)
        with environment, check if self.case.unchecked else nullcontext():
            self.helper = TECudaGraphHelper(
                self.chunks, self.config, self.case.sequence, self.case.micro_batch, [self.optimizer]
            )
        return self.helper

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The layers that are captured."""
        from megatron.core.utils import get_attr_wrapped_model

        layers = [layer for chunk in self.chunks for layer in get_attr_wrapped_model(chunk, "decoder").layers]
        for chunk in self.chunks if self.case.mtp else ():
            from megatron.core.transformer._cuda_graphs.te.layers import mtp_layers  # not there with the patch off

            model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
            layers += mtp_layers(model)
        return layers

    def capture(self, capture: Callable[["Training"], None]) -> None:
        """Call ``capture`` as megatron.training calls ``create_cudagraphs``."""
        first_step_done = bool(self.losses)
        if first_step_done:
            self._gather_in_hooks(False)
        with torch.cuda.stream(self.stream), mock.patch.dict(os.environ, self.case.environment):
            capture(self)
        if first_step_done:
            self._gather_in_hooks(True)

    def capture_finished(self) -> bool:
        """Ask the helper before a step, as megatron.training does."""
        self._set_microbatches(len(self.losses))
        with torch.cuda.stream(self.stream), mock.patch.dict(os.environ, self.case.environment):
            finished: bool = self.helper.capture_finished()
        return finished

    def step(self) -> None:
        """Train one step."""
        from megatron.core import parallel_state

        with torch.cuda.stream(self.stream):
            number = len(self.losses)
            self._set_microbatches(number)
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            self.replayed = []
            with mock.patch.object(torch.cuda.CUDAGraph, "replay", _noting_replays(self.replayed)):
                reduced = self._run_passes(number)
            self.step_replays.append(_number_of(self.replayed, _cuda_graphs(self.layers, self.helper)))
            _, grad_norm, _ = self.optimizer.step()
            # only the last pipeline stage has losses
            loss = torch.stack([item["loss"] for item in reduced]).mean() if reduced else torch.zeros((), device="cuda")
            dist.all_reduce(loss)
            stages = parallel_state.get_pipeline_model_parallel_world_size()
            self.losses.append(loss.item() / (dist.get_world_size() // stages))
            self.grad_norms.append(-1.0 if grad_norm is None else float(grad_norm))
            for group in self.optimizer.param_groups if self.case.optimizer_graph else ():
                group["lr"].mul_(0.75)  # a graph must read the learning rate of each step
        if number == 0:
            self._gather_in_hooks(True)

    def _run_passes(self, step: int, forward_only: bool = False) -> list[dict[str, torch.Tensor]]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        batches = [self._batches(step) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self.chunks,
            num_microbatches=self.case.microbatches_of(step),
            seq_length=self.case.sequence_of(step),
            micro_batch_size=self.case.micro_batch_of(step),
            forward_only=forward_only,
        )

    def evaluate(self) -> None:
        """Run forward passes in evaluation mode, outside any step."""
        for chunk in self.chunks:
            chunk.eval()
        replayed: list[Any] = []
        noting = mock.patch.object(torch.cuda.CUDAGraph, "replay", _noting_replays(replayed))
        with torch.cuda.stream(self.stream), torch.no_grad(), noting:
            self._gather_in_hooks(False, param_sync=True)
            losses = self._run_passes(EVALUATION + len(self.evaluations), forward_only=True)
            self.evaluations.append([item["loss"].item() for item in losses])  # waits for this stream
        self.evaluation_replays.append(_number_of(replayed, _evaluation_graphs(self.layers)))
        for chunk in self.chunks:
            chunk.train()
        self._gather_in_hooks(True)

    def trace(self) -> Trace:
        """Return what was computed so far."""
        torch.cuda.synchronize()
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        shards = [getattr(param, "_local_tensor", param).detach().clone().cpu() for param in params]
        graphs = _local_graphs(self.layers) if self.case.local else _layer_graphs(self.layers)
        of_evaluations = self.evaluations, self.evaluation_replays
        return Trace(self.losses, self.grad_norms, shards, graphs, self.step_replays, *of_evaluations)


def train(case: Case, graphs: bool, at_capture: Callable[[Training], None] | None = None) -> Trace:
    """Train ``case`` and return its trace.

    Args:
        case: What to train.
        graphs: Whether layers are captured after ``case.warmup`` steps.
        at_capture: Called in place of the capture; with ``case.local``, whose graphs capture themselves, at the
            beginning.
    """
    training = _training(case)(case, graphs)
    by_helper = graphs and not case.local
    if by_helper:
        training.make_helper()
    try:
        if graphs and case.local and at_capture is not None:
            at_capture(training)
        for step in range(case.steps):
            first = step == case.warmup
            if first and case.evaluates_often:
                training.evaluate()
            if by_helper and not training.capture_finished() and first:
                training.capture(at_capture or (lambda training: training.helper.create_cudagraphs()))
            if first and case.evaluates_often:
                training.evaluate()
            training.step()
            if case.evaluates_often or (first and case.evaluates):
                training.evaluate()
        trace = training.trace()
        if training.helper is not None and training.helper.graphs_created():
            training.helper.delete_cuda_graphs()
        return trace
    finally:
        training.patches.close()
        if case.local:
            from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

            delete_cuda_graphs()
        _clear_caches_of_rotary_embeddings()


def _clear_caches_of_rotary_embeddings() -> None:
    """Forget the last embeddings that were called: the caches hold the modules, and by their hooks the models."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()


def _training(case: Case) -> type[Training]:
    from .hybrid_training import HybridTraining
    from .vision_training import CaptionTraining, VisionTraining

    if case.pattern:
        return HybridTraining
    if case.captions:
        return CaptionTraining
    return VisionTraining if case.vision else Training


def _noting_replays(replayed: list[Any]) -> Callable[[Any], None]:
    replay = torch.cuda.CUDAGraph.replay

    def note(graph: Any) -> None:
        replayed.append(graph)
        replay(graph)

    return note


def _cuda_graphs(layers: list[torch.nn.Module], helper: Any) -> list[Any]:
    """The CUDA graphs that replays of the layers or of the whole model run, with this project's engine."""
    slots = [engine_callable(graph) for layer in layers for graph in getattr(layer, "cuda_graphs", ())]
    if getattr(helper, "model_graphs", None) is not None:
        slots.append(helper.model_graphs.passes)
    graphs = [getattr(slot, name, None) for slot in slots for name in ("forward_graph", "backward_graph")]
    return [graph for graph in graphs if graph is not None]


def _evaluation_graphs(layers: list[torch.nn.Module]) -> list[Any]:
    graphs = [getattr(layer, "evaluation_graph", None) for layer in layers]
    return [engine_callable(graph).forward_graph for graph in graphs if graph is not None]


def _number_of(replayed: list[Any], graphs: list[Any]) -> int:
    """How many of ``replayed`` are among ``graphs``."""
    ours = set(map(id, graphs))
    return sum(id(graph) in ours for graph in replayed)


def engine_callable(graph: Any) -> Any:
    """The engine's callable of one of ``layer.cuda_graphs``."""
    return getattr(graph.graphed, "graphed", graph.graphed)  # those of vision encoders are in a wrapper


def _layer_graphs(layers: list[torch.nn.Module]) -> int:
    return sum(len(getattr(layer, "cuda_graphs", ())) for layer in layers)


def _local_graphs(layers: list[torch.nn.Module]) -> int:
    """Count the pairs of graphs of all managers of the layers."""
    managers = [module for layer in layers for module in layer.modules() if hasattr(module, "cudagraph_runners")]
    return sum(runner.bwd_graph is not None for manager in managers for runner in manager.cudagraph_runners)


def _config(case: Case, graphs: bool):
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    moe: dict[str, Any] = {}
    if case.experts:
        moe = {
            "num_moe_experts": case.experts,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall",
            "moe_ffn_hidden_size": case.hidden * 2,
            "moe_aux_loss_coeff": 1e-2,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_layer_freq": list(case.moe_layer_freq) if isinstance(case.moe_layer_freq, tuple) else 1,
            "moe_shared_expert_intermediate_size": case.shared_experts or None,
            "moe_shared_expert_overlap": case.shared_overlap,
            "overlap_moe_expert_parallel_comm": case.ep_overlap,
            "delay_wgrad_compute": case.delay_wgrad,
            "moe_expert_capacity_factor": case.capacity,
            "moe_pad_expert_input_to_capacity": case.capacity is not None,
            "add_bias_linear": False,
        }
        if case.transformer_engine:
            moe["moe_grouped_gemm"] = True
    if case.fp8:
        moe |= {"fp8": "hybrid", "fp8_recipe": case.fp8, "fp8_param": case.fp8_params}
    if case.recompute:
        moe |= {"recompute_granularity": "selective", "recompute_modules": list(case.recompute)}
        # A recomputed MLP would return its bias, a parameter, which becomes an output of its own recomputation.
        moe["add_bias_linear"] = "mlp" not in case.recompute and not case.experts
    from megatron.core import parallel_state

    kind: Any = TransformerConfig
    if case.latent_attention:
        kind = MLATransformerConfig
        ranks = {"q_lora_rank": case.hidden // 4, "kv_lora_rank": case.hidden // 4}
        moe |= ranks | {"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "rope_type": "rope"}
    if case.positions == "mrope":
        half = case.hidden // case.heads // 2
        moe["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    config = kind(
        num_layers=case.layers,
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        ffn_hidden_size=case.hidden * 4,
        hidden_dropout=case.dropout,
        attention_dropout=case.dropout,
        bf16=case.dtype == "bf16",
        fp16=case.dtype == "fp16",
        params_dtype=case.torch_dtype,
        pipeline_dtype=case.torch_dtype,
        cuda_graph_impl=("local" if case.local else "transformer_engine") if graphs else "none",
        cuda_graph_modules=list(case.modules) if graphs else [],
        cuda_graph_warmup_steps=case.warmup,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=case.virtual,
        overlap_p2p_comm=case.virtual is not None,
        batch_p2p_comm=case.virtual is None,
        deallocate_pipeline_outputs=True,
        sequence_parallel=case.sequence_parallel,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        mtp_num_layers=case.mtp or None,
        is_hybrid_model=bool(case.pattern),
        gradient_accumulation_fusion=case.fused_wgrad,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=case.packed > 0 and case.transformer_engine,
        deterministic_mode=False,
        **moe,
    )
    config.cuda_graph_max_captures = case.max_captures
    if case.positions == "yarn":
        vars(config).update(YARN)  # megatron.training sets them as attributes too
    config.cuda_graph_packed_sequences = case.packed or None
    return config


def _model(case: Case, config):
    return _under_fsdp(case, config, _gpt(case, config))


def gpt_layer_spec(case: Case):
    """The spec of a GPT's layers, all of one kind."""
    from megatron.core.models.gpt import gpt_layer_specs

    if not case.transformer_engine:
        return gpt_layer_specs.get_gpt_layer_local_spec(num_experts=case.experts or None, moe_grouped_gemm=False)
    return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=case.experts or None,
        moe_grouped_gemm=bool(case.experts),
        multi_latent_attention=case.latent_attention,
    )


def _gpt(case: Case, config, virtual_stage: int | None = None):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    spec = gpt_layer_spec(case)
    if isinstance(case.moe_layer_freq, tuple):
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=case.transformer_engine)
    if case.packed and not case.transformer_engine:
        from .packed_attention import with_packed_attention

        spec = with_packed_attention(spec)
    if case.local and "moe_router" in case.modules and config.cuda_graph_impl == "local":
        from megatron.core.transformer.transformer_layer import MoETransformerLayer

        spec.module = MoETransformerLayer  # the same layer, in parts that local graphs can hold
    mtp = None
    if case.mtp:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=case.transformer_engine, vp_stage=virtual_stage
        )
    return GPTModel(
        config,
        spec,
        VOCABULARY,
        case.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage),
        position_embedding_type=case.positions,
        share_embeddings_and_output_weights=case.tied,
        vp_stage=virtual_stage,
        mtp_block_spec=mtp,
    )


def _under_fsdp(case: Case, config, model):
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    options = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=case.strategy,
        overlap_grad_reduce=True,
        overlap_param_gather=case.overlap_param_gather,
        grad_reduce_in_fp32=True,
        check_for_nan_in_grad=False,
        gradient_reduce_div_fusion=False,
        fp8_param_gather=case.fp8_params,
        nccl_ub=case.nccl_ub,
        fsdp_double_buffer=case.double_buffer,
        fsdp_db_use_persist_buf_on_alloc_fail=case.double_buffer,
        megatron_fsdp_cuda_graph_mode=config.cuda_graph_impl != "none",
    )
    return FullyShardedDataParallel(config, options, _on_device(case, config, model))


def _under_ddp(case: Case, config, model):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=case.overlap_param_gather,
        align_param_gather=case.virtual is not None,
        grad_reduce_in_fp32=True,
        bucket_size=case.bucket,
    )
    return DistributedDataParallel(config, options, _on_device(case, config, model))


def _under_torch_fsdp(case: Case, config, model):
    from megatron.core.distributed import TorchFullyShardedDataParallel
    from megatron.core.distributed.torch_fully_sharded_data_parallel_config import (
        TorchFullyShardedDataParallelConfig,
    )

    if not case.transformer_engine:
        config.transformer_impl = "local"  # whose linear layers are not sharded by themselves
    options = TorchFullyShardedDataParallelConfig(reshard_after_forward=case.reshard)
    return TorchFullyShardedDataParallel(config, options, _on_device(case, config, model))


def _on_device(case: Case, config, model):
    from megatron.core.transformer.module import Float16Module

    model = model.cuda()
    return model if case.dtype == "fp32" else Float16Module(config, model)


def _optimizer(case: Case, chunks: list[torch.nn.Module]):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        weight_decay=0.01,
        clip_grad=1.0,
        bf16=case.dtype == "bf16",
        fp16=case.dtype == "fp16",
        initial_loss_scale=2.0**18,
        loss_scale_window=3,
        hysteresis=1,
        params_dtype=case.torch_dtype,
        use_distributed_optimizer=not case.torch_fsdp,
        optimizer_cuda_graph=case.optimizer_graph,
    )
    return get_megatron_optimizer(config, chunks)


def _batches(case: Case, step: int):
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    if case.later_on_one_rank and rank != ranks - 1:
        case = replace(case, sequences_later=(), micro_batches_later=())
    microbatches, size = case.microbatches_of(step), case.micro_batch_of(step)
    count = size * microbatches * ranks
    sequence = case.sequence_of(step)
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (count, sequence + 1), generator=generator)
    tokens = tokens.view(ranks, microbatches, size, sequence + 1)[rank]
    mask = torch.triu(torch.ones(sequence, sequence, dtype=torch.bool), 1)
    positions = torch.arange(sequence).expand(size, -1)
    for microbatch in tokens:
        if case.positions == "mrope":  # other positions in every micro-batch, as images in a text give
            steps = torch.randint(1, 4, (3, size, sequence), generator=generator)
            positions = steps.cumsum(-1)
        packed = None
        if case.packed:
            from .packed_attention import packed_params, positions_in_sequences

            packed = packed_params(sequence, case.packed, generator)
            positions = positions_in_sequences(packed.cu_seqlens_q).expand(case.micro_batch, -1)
        batch = {
            "tokens": microbatch[:, :-1].contiguous().cuda(),
            "labels": microbatch[:, 1:].contiguous().cuda(),
            "position_ids": positions.contiguous().cuda(),
            "attention_mask": mask.expand(size, 1, -1, -1).contiguous().cuda(),
        }
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
        yield SimpleNamespace(
            tokens=batch["tokens"],
            labels=batch["labels"],
            positions=batch["position_ids"],
            mask=None if packed else batch["attention_mask"],
            packed=packed,
        )
