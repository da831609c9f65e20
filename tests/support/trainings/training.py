"""Train a small model, eagerly or with CUDA graphs, and record the values to compare.

The code uses ``torch.cuda``: on CPU ranks, install the CPU backend first.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import checkpoint

from tests.support.layers import small_transformer_engine
from tests.support.layers.fused_gradients import fused_kernels
from tests.support.layers.latent_projections import latent_projections
from tests.support.layers.sequence_parallel_norms import sequence_parallel_norms
from tests.support.trainings import models
from tests.support.trainings.case import EVALUATION, VOCABULARY, Case


@dataclass
class Trace:
    """Results of a run on this rank.

    Attributes:
        losses: Per step, the mean loss over micro-batches and data-parallel ranks.
        grad_norms: Per step; -1 if the optimizer skipped the step.
        shards: Local shards of the optimizer's final parameters.
        graphs: Number of layer graphs.
        step_replays: Per step, the number of graph replays.
        evaluations: Per evaluation, the losses of its micro-batches.
        evaluation_replays: Per evaluation, the number of graph replays.
        clipping_replays: Number of replays of the last gradient-norm graph.
        logged: Per step, auxiliary losses of MoE layers, and losses and accuracy counts of multi-token prediction.
    """

    losses: list[float]
    grad_norms: list[float]
    shards: list[torch.Tensor]
    graphs: int = 0
    step_replays: list[int] = field(default_factory=list)
    evaluations: list[list[float]] = field(default_factory=list)
    evaluation_replays: list[int] = field(default_factory=list)
    clipping_replays: int = 0
    logged: list[dict[str, list[float]]] = field(default_factory=list)

    @property
    def replays(self) -> int:
        """Number of graph replays in the last step."""
        return self.step_replays[-1]

    def differences(self, other: "Trace") -> list[str]:
        """Return the bitwise differences between this trace and ``other``."""
        found = []
        for what in ("losses", "grad_norms", "evaluations", "logged"):
            for step, (mine, theirs) in enumerate(zip(getattr(self, what), getattr(other, what), strict=True)):
                if mine != theirs:
                    found.append(f"{what}[{step}]: {mine!r} and {theirs!r}")
        for index, (mine, theirs) in enumerate(zip(self.shards, other.shards, strict=True)):
            if not torch.equal(mine, theirs):
                found.append(f"shard {index}: {(mine != theirs).sum().item()} of {mine.numel()} elements")
        return found


class Training:
    """A model and its optimizer, ready to train. Requires model-parallel groups.

    Attributes:
        chunks: The wrapped model chunks of this pipeline stage.
    """

    def __init__(self, case: Case, graphs: bool):
        from megatron.core import parallel_state
        from megatron.core.full_cuda_graph import get_shared_capture_stream
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        self.case = case
        # sized by the previous model
        MoEAuxLossAutoScaler.main_loss_backward_scale = None
        destroy_moe_metrics_tracker()
        MTPLossLoggingHelper.tracker.clear()
        parallel_state.set_virtual_pipeline_model_parallel_world_size(case.virtual)
        torch.manual_seed(1234)
        model_parallel_cuda_manual_seed(
            1234, te_rng_tracker=case.transformer_engine, use_cudagraphable_rng=True, force_reset_rng=True
        )
        self._set_microbatches(0)
        self.patches = ExitStack()  # closed at the end of training
        if case.fp8 and not case.transformer_engine:
            self.patches.enter_context(small_transformer_engine.in_megatron())
        if case.get("sequence_parallel") and not case.transformer_engine:
            self.patches.enter_context(sequence_parallel_norms())
        if case.get("moe_latent_size") and not case.transformer_engine:
            self.patches.enter_context(latent_projections())
        fused = case.get("gradient_accumulation_fusion") and case.wrapper == "fsdp"
        if fused and not case.transformer_engine:
            self.patches.enter_context(fused_kernels())
        self.config = models.transformer_config(case, graphs)
        self.stream = building = torch.cuda.Stream()
        self._passes = get_forward_backward_func()
        if self.config.cuda_graph_impl == "full_iteration":
            self.stream, building = torch.cuda.default_stream(), get_shared_capture_stream()  # as in megatron.training
            self._passes = self._captured_iteration(self._passes)
        with torch.cuda.stream(building):
            self.chunks = self._wrapped_chunks()
            self.optimizer = models.optimizer(case, self.chunks)
        self.helper: Any = None
        self._connect()
        if case.norm_on_device:
            from tests.support.layers.norm_on_device import norm_on_device

            self.patches.enter_context(norm_on_device())
        self._gather_in_hooks(False)
        self.taken: list[torch.Tensor] = []  # memory allocated by a control
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.replayed: list[Any] = []  # graphs replayed in the last step
        self.evaluations: list[list[float]] = []
        self.evaluation_replays: list[int] = []
        self.step_replays: list[int] = []  # layer graph replays per step
        self.logged: list[dict[str, list[float]]] = []

    def _set_microbatches(self, step: int) -> None:
        from megatron.core import num_microbatches_calculator as calculator
        from megatron.core import parallel_state

        calculator.unset_num_microbatches_calculator()
        ranks = parallel_state.get_data_parallel_world_size()
        size, count = self.case.micro_batch_of(step), self.case.microbatches_of(step)
        calculator.init_num_microbatches_calculator(0, None, size * ranks * count, size, ranks)

    def _wrapped_chunks(self) -> list[torch.nn.Module]:
        stages = [None] if self.case.virtual is None else range(self.case.virtual)
        return [models.wrapped(self.case, self.config, self._unwrapped_chunk(stage)) for stage in stages]

    def _unwrapped_chunk(self, virtual_stage: int | None) -> torch.nn.Module:
        return models.gpt(self.case, self.config, virtual_stage)

    def _connect(self) -> None:
        """Set the configuration's callbacks for schedules, as megatron.training does."""
        from megatron.core.distributed import finalize_model_grads

        self.config.no_sync_func = self._of_chunks("no_sync")
        if self.case.wrapper == "ddp":
            self.config.grad_sync_func = self._of_chunks("start_grad_sync")
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

    def _captured_iteration(self, passes: Callable) -> Callable:
        """Wrap the schedule ``passes`` in ``FullCudaGraphWrapper``, which captures after ``case.warmup`` steps."""
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

        for buffers in StaticBufferLoader.static_buffers.values():
            self.patches.callback(buffers.clear)
        wrapper = FullCudaGraphWrapper(passes, cuda_graph_warmup_steps=self.case.warmup)
        self.patches.callback(wrapper.reset_cuda_graph)
        return wrapper

    def _of_chunks(self, method: str) -> Callable | list[Callable]:
        methods = [getattr(chunk, method) for chunk in self.chunks]
        return methods[0] if len(methods) == 1 else methods

    def _gather_in_hooks(self, on: bool, param_sync: bool = False) -> None:
        """Enable or disable parameter gathering in forward hooks.

        megatron.training disables gathering in the first step, during capture and in evaluation.

        Args:
            on: Enable gathering.
            param_sync: When disabling gathering in hooks, gather all parameters immediately.
        """
        if self.case.wrapper != "ddp" or not self.case.get("overlap_param_gather", True):
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
        """Return the losses of ``batch``, or its schedule plan if ``model`` is a ``build_schedule_plan`` method."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
        from megatron.core.utils import get_attr_wrapped_model

        packed = {"packed_seq_params": batch.packed} if self.case.packed else {}
        if self.case.mtp:
            packed["loss_mask"] = batch.loss_mask

        def losses(tokens: torch.Tensor) -> Any:
            labels = {} if self.case.loss_outside else {"labels": batch.labels}
            output = model(tokens, batch.positions, batch.mask, **labels, **packed)
            if self.case.loss_outside and get_attr_wrapped_model(model, "post_process"):
                output = vocab_parallel_cross_entropy(output, batch.labels)
            return output

        further = [losses(batch.tokens.roll(number, 0)) for number in range(1, self.case.passes)]
        return sum(further, losses(batch.tokens))

    def _forward_step(self, batches: Iterator[Any], model: torch.nn.Module, return_schedule_plan: bool = False):
        def loss_of(losses):
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}

        batch = SimpleNamespace(**next(batches))
        return self._losses(model.build_schedule_plan if return_schedule_plan else model, batch), loss_of

    def make_helper(self) -> Any:
        from megatron.core.transformer import cuda_graphs as te_helper
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        check = mock.patch.object(te_helper, "check")
        with check if self.case.unchecked else nullcontext():
            self.helper = TECudaGraphHelper(
                self.chunks, self.config, self.case.sequence, self.case.micro_batch, [self.optimizer]
            )
        return self.helper

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The captured layers."""
        from megatron.core.utils import get_attr_wrapped_model

        layers = [layer for chunk in self.chunks for layer in get_attr_wrapped_model(chunk, "decoder").layers]
        for chunk in self.chunks if self.case.mtp else ():
            # Absent if the patch is disabled.
            from megatron.core.transformer._cuda_graphs.te.layers import mtp_layers

            model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
            layers += mtp_layers(model)
        return layers

    def capture(self, capture: Callable[["Training"], None]) -> None:
        """Call ``capture``, a replacement for ``create_cudagraphs``, in the state that megatron.training sets up."""
        first_step_done = bool(self.losses)
        if first_step_done:
            self._gather_in_hooks(False)
        # A recapture may change this attribute.
        self.config.cuda_graph_layers_per_graph = self.case.cuda_graph_layers_per_graph
        with torch.cuda.stream(self.stream):
            capture(self)
        if first_step_done:
            self._gather_in_hooks(True)

    def before_step(self) -> bool:
        """Call the helper's ``before_step``, like megatron.training."""
        self._set_microbatches(len(self.losses))
        with torch.cuda.stream(self.stream):
            finished: bool = self.helper.before_step()
        return finished

    def step(self) -> None:
        """Train one step."""
        from megatron.core import parallel_state

        with torch.cuda.stream(self.stream):
            number = len(self.losses)
            for chunk in self.chunks if number == 1 else ():
                for param in models.parameters_of(chunk, self.case.frozen_later):
                    param.requires_grad_(False)
            self._set_microbatches(number)
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            self.replayed = []
            with mock.patch.object(torch.cuda.CUDAGraph, "replay", _noting_replays(self.replayed)):
                reduced = self._run_passes(number)
            self.step_replays.append(_number_of(self.replayed, self._graphs()))
            self._read_log()
            for group in self.optimizer.param_groups:
                if group.get("max_lr") == self.case.get("decoupled_lr", -1):
                    group["lr"] = group["max_lr"] * (number >= self.case.thawed)
            _, grad_norm, _ = self.optimizer.step()
            # only in the last pipeline stage
            loss = torch.stack([item["loss"] for item in reduced]).mean() if reduced else torch.zeros((), device="cuda")
            dist.all_reduce(loss)
            stages = parallel_state.get_pipeline_model_parallel_world_size()
            self.losses.append(loss.item() / (dist.get_world_size() // stages))
            self.grad_norms.append(-1.0 if grad_norm is None else float(grad_norm))
        if number == 0:
            self._gather_in_hooks(True)

    def release(self) -> None:
        """Release the graphs, and move the optimizer to the host and back."""
        with torch.cuda.stream(self.stream):
            if self.helper is not None:
                self.helper.release()
            elif self.config.cuda_graph_impl == "full_iteration":
                self._passes.reset_cuda_graph()
            self.optimizer.offload_to_cpu()
            taken = torch.empty(1 << 20, device="cuda")  # forces new addresses on restore
            self.optimizer.restore_from_cpu()
            del taken

    def restore(self) -> None:
        """Restore the graphs."""
        with torch.cuda.stream(self.stream):
            if self.helper is not None:
                self.helper.restore()

    def _graphs(self) -> list[Any]:
        """Return the graphs of training passes; local graphs are not included."""
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        one = FullCudaGraphWrapper.cuda_graph["training"]
        return [one] if self.case.full_iteration else _cuda_graphs(self.layers, self.helper)

    def halve_weights(self) -> None:
        """Halve the weights in this rank's shards, in place."""
        with torch.cuda.stream(self.stream):
            for chunk in self.chunks:
                chunk.synchronize_param_gather()  # pending gathers read them
                for group in chunk.param_and_grad_buffer.parameter_groups:
                    for buffer in filter(None, (group.model_weight_buffer, group.main_weight_buffer)):
                        buffer.data.copy_(buffer.data * 0.5)

    def checkpoint(self, save: bool) -> None:
        """Save the weights and the optimizer's states, or load the saved ones."""
        from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor

        if save:
            folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
            dist.broadcast_object_list(folder)
            self.folder = folder[0]
            self.patches.callback(shutil.rmtree, self.folder, ignore_errors=True)
        (chunk,), kind = self.chunks, {"distrib_optim_sharding_type": "fsdp_dtensor"}
        with torch.cuda.stream(self.stream):
            contents = {"model": chunk.state_dict()}
            contents["optimizer"] = self.optimizer.sharded_state_dict({}, is_loading=not save, metadata=kind)
            uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(contents)
            (checkpoint.save if save else checkpoint.load)(contents, checkpoint_id=self.folder)
            if not save:
                chunk.load_state_dict(contents["model"])
                self.optimizer.load_state_dict(contents["optimizer"])

    def _read_log(self) -> None:
        """Read and clear the logged metrics of MoE layers and multi-token prediction."""
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        tracker = get_moe_metrics_tracker()
        logged = {name: entry.values.tolist() for name, entry in tracker.metrics.items()}
        tracker.clear()
        MTPLossLoggingHelper.reduce_metrics_in_tracker()
        values = MTPLossLoggingHelper.tracker.items()
        self.logged.append(logged | {name: value.tolist() for name, value in values if name.endswith("values")})
        MTPLossLoggingHelper.clean_metrics_in_tracker()

    def _run_passes(self, step: int, forward_only: bool = False) -> list[dict[str, torch.Tensor]]:
        batches = [map(vars, self._batches(step)) for _ in self.chunks]
        return self._passes(
            forward_step_func=self._forward_step,
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self.chunks,
            num_microbatches=self.case.microbatches_of(step),
            seq_length=self.case.sequence_of(step),
            micro_batch_size=self.case.micro_batch_of(step),
            forward_only=forward_only,
        )

    def evaluate(self) -> None:
        """Evaluate between steps."""
        for chunk in self.chunks:
            chunk.eval()
        replayed: list[Any] = []
        noting = mock.patch.object(torch.cuda.CUDAGraph, "replay", _noting_replays(replayed))
        with torch.cuda.stream(self.stream), torch.no_grad(), noting:
            self._gather_in_hooks(False, param_sync=True)
            losses = self._run_passes(EVALUATION + len(self.evaluations), forward_only=True)
            self.evaluations.append([item["loss"].item() for item in losses])  # synchronizes
        self.evaluation_replays.append(_number_of(replayed, _evaluation_graphs(self.helper)))
        for chunk in self.chunks:
            chunk.train()
        self._gather_in_hooks(True)

    def trace(self) -> Trace:
        """Return the results so far."""
        torch.cuda.synchronize()
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        shards = [getattr(param, "_local_tensor", param).detach().clone().cpu() for param in params]
        graphs = len(local_runners(self.layers)) if self.case.local else _layer_graphs(self.layers)
        of_evaluations = self.evaluations, self.evaluation_replays
        passes = [chunk.module.graphs.whole_passes for chunk in self.chunks if hasattr(chunk.module, "graphs")]
        clipping = sum(work.replays for each in filter(None, passes) for work in each.repeated.values())
        return Trace(
            self.losses, self.grad_norms, shards, graphs, self.step_replays, *of_evaluations, clipping, self.logged
        )


def distributed_optimizers(optimizer: Any) -> list[Any]:
    """Return the distributed optimizers in ``optimizer``, which may be chained."""
    return [each for each in getattr(optimizer, "chained_optimizers", [optimizer]) if hasattr(each, "_kept")]


def train(case: Case, graphs: bool, at_capture: Callable[[Training], None] | None = None) -> Trace:
    """Train ``case`` and return its trace.

    Args:
        case: The case to train.
        graphs: Whether to capture after ``case.warmup`` steps.
        at_capture: Called in place of the capture; with ``case.local``, called before the first step.
    """
    training = _training(case)(case, graphs)
    by_helper = graphs and case.implementation == "transformer_engine"
    if by_helper:
        training.make_helper()
    try:
        if graphs and case.local and at_capture is not None:
            at_capture(training)
        for step in range(case.steps):
            first = step == case.warmup
            often = case.evaluates == "often"
            if first and often:
                training.evaluate()
            if case.released in (step, step - 1):
                training.release()
                training.evaluate()
            if case.released == step - 1:
                training.restore()
            if case.reloads and (first or case.released in (step - 1, step + 1)):
                training.checkpoint(save=first)
            if case.released == step - 2 and case.wrapper == "fsdp":
                training.halve_weights()
            if by_helper and not training.before_step() and first:
                training.capture(at_capture or (lambda training: training.helper.create_cudagraphs()))
            if first and often:
                training.evaluate()
            training.step()
            if often or (first and case.evaluates):
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
    """Clear caches that keep models alive through the hooks of their embeddings."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()


def _training(case: Case) -> type[Training]:
    from tests.support.trainings.hybrid_training import HybridTraining
    from tests.support.trainings.vision_training import CaptionTraining, VisionTraining

    if case.pattern:
        return HybridTraining
    return {"gpt": Training, "vision": VisionTraining, "captions": CaptionTraining}[case.model]


def _noting_replays(replayed: list[Any]) -> Callable[[Any], None]:
    replay = torch.cuda.CUDAGraph.replay

    def note(graph: Any) -> None:
        replayed.append(graph)
        replay(graph)

    return note


def _cuda_graphs(layers: list[torch.nn.Module], helper: Any) -> list[Any]:
    """Return the forward and backward CUDA graphs of layers and models."""
    slots = [engine_callable(graph) for layer in layers for graph in getattr(layer, "cuda_graphs", ())]
    slots += whole_passes(helper)
    graphs = [getattr(slot, name, None) for slot in slots for name in ("forward_graph", "backward_graph")]
    return [graph for graph in graphs if graph is not None]


def whole_passes(helper: Any) -> list[Any]:
    """Return the slots of all whole-pass graphs."""
    return [passes for graphs in standing_in(helper) for passes in graphs.slots]


def standing_in(helper: Any) -> list[Any]:
    """Return the owners of whole-pass graphs: one for each captured model or chunk."""
    helpers = [helper, getattr(helper, "vision", None), getattr(helper, "language", None)]
    return [graphs for each in helpers if hasattr(each, "_state") for graphs in each._state.models]


def _evaluation_graphs(helper: Any) -> list[Any]:
    graphs = [getattr(graphs, "evaluation", None) for graphs in standing_in(helper)]
    return [graph.slots[0].forward_graph for graph in graphs if graph is not None]


def _number_of(replayed: list[Any], graphs: list[Any]) -> int:
    """Return how many of ``replayed`` are in ``graphs``."""
    ours = set(map(id, graphs))
    return sum(id(graph) in ours for graph in replayed)


def engine_callable(graph: Any) -> Any:
    """Return the engine's callable for an entry of ``layer.cuda_graphs``."""
    return getattr(graph.graphed, "graphed", graph.graphed)  # vision encoders wrap it


def _layer_graphs(layers: list[torch.nn.Module]) -> int:
    """Return the number of captured layers. A layer with its own graphs counts once per slot."""
    return sum(len(getattr(layer, "cuda_graphs", ())) for layer in layers)


def local_runners(layers: list[torch.nn.Module]) -> list[Any]:
    """Return the runners of local graphs in ``layers``."""
    modules = (module for layer in layers for module in layer.modules())
    return [runner for module in modules for runner in getattr(module, "cudagraph_runners", ())]


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
    if case.masked_step is not None:
        mask |= torch.tril(torch.ones_like(mask), -4)
    given = not case.packed and case.masked_step in (None, step)
    positions = torch.arange(sequence).expand(size, -1)
    for microbatch in tokens:
        if case.positions == "mrope":  # positions differ between micro-batches, as with images in a text
            steps = torch.randint(1, 4, (3, size, sequence), generator=generator)
            positions = steps.cumsum(-1)
        packed = None
        if case.packed:
            from tests.support.layers.packed_attention import packed_params, places_on_rank, positions_in_sequences

            packed = packed_params(sequence, case.packed, generator, parallel_state.get_context_parallel_world_size())
            positions = positions_in_sequences(packed.cu_seqlens_q).expand(case.micro_batch, -1)
        batch = {
            "tokens": microbatch[:, :-1].contiguous().cuda(),
            "labels": microbatch[:, 1:].contiguous().cuda(),
            "position_ids": positions.contiguous().cuda(),
            "attention_mask": mask.expand(size, 1, -1, -1).contiguous().cuda(),
        }
        if case.mtp:
            batch["loss_mask"] = (torch.rand(size, sequence, generator=generator) < 0.9).float().cuda()
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1 and packed is not None:
            del batch["attention_mask"]
            own = places_on_rank(packed.cu_seqlens_q, sequence // group.size(), group.rank(), group.size())
            batch = {name: value.index_select(1, own) for name, value in batch.items()}
        elif group.size() > 1:
            whole = {"position_ids": batch.pop("position_ids")} if case.positions == "mrope" else {}
            batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group) | whole
        yield SimpleNamespace(
            tokens=batch["tokens"],
            labels=batch["labels"],
            positions=batch["position_ids"],
            mask=batch["attention_mask"] if given else None,
            packed=packed,
            loss_mask=batch.get("loss_mask"),
        )
