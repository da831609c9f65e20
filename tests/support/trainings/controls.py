"""Define negative controls (captures with one broken part, which comparisons must detect) and unusual captures."""

import gc
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.support.trainings.training import Training, distributed_optimizers, local_runners, standing_in

CONTROLS: dict[str, Callable[[Training], None]] = {}


def control(function: Callable[[Training], None]) -> Callable[[Training], None]:
    """Register a control, to be called in place of ``create_cudagraphs``."""
    CONTROLS[function.__name__] = function
    return function


@control
def dead_replay(training: Training) -> None:
    """Make replays do nothing."""
    training.helper.create_cudagraphs()
    _kill_replays(training)


def _kill_replays(training: Training) -> None:
    training.patches.enter_context(mock.patch.object(torch.cuda.CUDAGraph, "replay"))


@control
def no_manual_hooks(training: Training) -> None:
    """Run layers under DistributedDataParallel without the hooks that gather parameters before a replay."""
    training.helper.create_cudagraphs()
    training.helper.cuda_graph_set_manual_hooks = mock.Mock()


@control
def hooks_left(training: Training) -> None:
    """Capture layers without removing their hooks."""
    from megatron.core.transformer._cuda_graphs import hooks

    with mock.patch.object(hooks.ModuleHooks, "extract", _keep_hooks):
        training.helper.create_cudagraphs()


def _keep_hooks(module, outside_only=False):
    from megatron.core.transformer._cuda_graphs.hooks import ModuleHooks

    names = [name for name in vars(module) if name.endswith("_hooks") or "_hooks_" in name]
    kept = {name: dict(value) for name in names if isinstance(value := getattr(module, name), dict)}
    return ModuleHooks(module, {name: kept.get(name, {}) for name in (*kept, "_forward_hooks_with_kwargs")})


@control
def no_post_backward_sentinel(training: Training) -> None:
    """Capture after deleting the attribute that identifies Megatron-FSDP's forward-pre hook."""
    _capture_without(training, training.layers[0]._forward_pre_hooks, "_cuda_graph_backward_handler")


@control
def no_pre_backward_sentinel(training: Training) -> None:
    """Capture after deleting the attribute that identifies Megatron-FSDP's forward hook."""
    _capture_without(training, training.layers[0]._forward_hooks, "_cuda_graph_backward_pre_handler")


def _capture_without(training: Training, hooks: Mapping[int, Any], sentinel: str) -> None:
    for hook in hooks.values():
        getattr(hook, "__dict__", {}).pop(sentinel, None)
    training.helper.create_cudagraphs()


@control
def failed_forward_capture(training: Training) -> None:
    """Fail the capture by synchronizing in the forward pass of a layer."""
    _fail_capture(training, lambda tensor: tensor.sum().item())


@control
def failed_backward_capture(training: Training) -> None:
    """Fail the capture by synchronizing in the backward pass of a layer."""
    _fail_capture(training, lambda tensor: tensor.register_hook(lambda grad: (grad.sum().item(), None)[1]) and None)


@control
def fallback_after_a_failure_on_one_rank(training: Training) -> None:
    """Run out of memory in a layer on the last rank. With ``cuda_graph_fallback``, all ranks continue eagerly."""

    def hook(module, args, output):
        raise torch.OutOfMemoryError("simulated: out of memory")

    training.config.cuda_graph_fallback = "eager"
    last = dist.get_rank() == dist.get_world_size() - 1
    handles = [training.layers[-1].mlp.register_forward_hook(hook)] if last else []
    with _unchanged_state(training):
        training.helper.create_cudagraphs()
    for handle in handles:
        handle.remove()
    assert training.helper.before_step() and not training.helper.graphs_created()


@control
def interrupted_on_one_rank(training: Training) -> None:
    """Interrupt the last rank in a capture, a recapture and an evaluation capture. All ranks must raise each time."""
    helper = training.helper
    training.config.cuda_graph_fallback = "eager"
    _interrupt(training, helper.create_cudagraphs)
    helper.create_cudagraphs()
    _interrupt(training, helper._recapture)
    helper.create_cudagraphs()
    if helper.model_graphs is not None:
        _interrupt(training, training.evaluate)
    for chunk in training.chunks:
        chunk.train()


def _interrupt(training: Training, capture: Callable[[], object]) -> None:
    """Call ``capture`` and raise KeyboardInterrupt in the last layer on the last rank."""
    mlp, last = training.layers[-1].mlp, dist.get_world_size() - 1
    forward = mlp.forward

    def interrupt(*args, **kwargs):
        if torch.cuda.is_current_stream_capturing():
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    raised = ""
    try:
        with mock.patch.object(mlp, "forward", interrupt) if dist.get_rank() == last else nullcontext():
            capture()
    except BaseException as error:
        raised = repr(error)
    everywhere = [raised] * dist.get_world_size()
    dist.all_gather_object(everywhere, raised)
    expected = rf"CaptureInterruptedError\('CUDA graph capture was interrupted on rank {last}, .*: KeyboardInterrupt'\)"
    assert everywhere[last] == "KeyboardInterrupt()", everywhere
    assert all(re.fullmatch(expected, text) for text in everywhere[:last]), everywhere


@control
def captured_for_each_shape(training: Training) -> None:
    """Capture; before each step with another shape, delete the graphs and capture that shape."""
    helper, case = training.helper, training.case
    helper.create_cudagraphs()

    def step() -> None:
        number = len(training.losses)
        shape = case.sequence_of(number), case.micro_batch_of(number)
        if shape != (helper.seq_length, helper.micro_batch_size):
            helper.delete_cuda_graphs()
            helper.seq_length, helper.micro_batch_size = shape
            with torch.cuda.stream(training.stream):
                helper.create_cudagraphs()
        Training.step(training)

    training.patches.enter_context(mock.patch.object(training, "step", step))


@control
def no_recaptures(training: Training) -> None:
    """Capture, then forbid recaptures when the number of micro-batches changes."""
    from megatron.core.transformer import cuda_graphs

    training.helper.create_cudagraphs()
    training.patches.enter_context(mock.patch.object(cuda_graphs, "MAX_RECAPTURES", 0))


@control
def hook_on_one_rank(training: Training) -> None:
    """Register a hook outside of layers on the last rank. All ranks must then capture layers, not the whole model."""
    _hook_on_last_rank(training, "embedding")


@control
def refused_on_one_stage(training: Training) -> None:
    """Register a hook outside of the layers on the last pipeline stage.

    All stages must then capture layers, not the whole model.
    """
    _hook_on_last_rank(training, "output_layer")


def _hook_on_last_rank(training: Training, name: str) -> None:
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        from megatron.core.utils import get_attr_wrapped_model

        get_attr_wrapped_model(training.chunks[-1], name).register_forward_hook(lambda *_: None)
    training.helper.create_cudagraphs()
    assert training.helper.model_graphs is None
    reason = f"{name} has hooks, which do not run in replays"
    expected = reason if dist.get_rank() == last else f"{reason} (on rank {last})"
    assert training.helper._state.scope.not_model == expected, training.helper._state.scope.not_model


@control
def late_hook_on_one_rank(training: Training) -> None:
    """Capture, then hook every second layer on the last rank so that these layers run eagerly between replays."""
    training.helper.create_cudagraphs()
    for layer in training.layers[1::2] if dist.get_rank() == dist.get_world_size() - 1 else ():
        # Not linear layers of experts: with moe_use_grouped_tensor, their hooks are refused.
        hooked = [module for name, module in layer.named_modules() if name.endswith(("linear_qkv", "router"))]
        assert hooked
        for module in hooked:
            module.register_forward_hook(lambda *_: None)


@control
def late_hook_on_one_rank_without_plans(training: Training) -> None:
    """Run ``late_hook_on_one_rank`` with collectives launched by hooks, not recorded in graphs."""
    with mock.patch.dict(os.environ, NCCL_GRAPH_MIXING_SUPPORT="0"):
        late_hook_on_one_rank(training)


@control
def eager_micro_batch_on_one_rank(training: Training) -> None:
    """Capture; the last rank then runs the second micro-batch of each step eagerly."""
    training.helper.create_cudagraphs()
    for graphs in standing_in(training.helper) if dist.get_rank() == dist.get_world_size() - 1 else ():
        assert len(graphs.slots) > 1
        inputs_of = graphs.inputs_of
        graphs.inputs_of = lambda given, passes, graphs=graphs, inputs_of=inputs_of: (
            None if passes is graphs.slots[1] else inputs_of(given, passes)
        )


@control
def captured_again(training: Training) -> None:
    """Capture, delete the graphs, and recapture."""
    training.helper.create_cudagraphs()
    training.helper.delete_cuda_graphs()
    assert not any(layer.cuda_graphs for layer in training.layers)
    training.helper.create_cudagraphs()


@control
def clipping_eager_on_one_rank(training: Training) -> None:
    """Capture; one rank then clips gradients eagerly."""
    training.helper.create_cudagraphs()
    if dist.get_rank() == 1:
        for optimizer in distributed_optimizers(training.optimizer):
            optimizer._whole_model_passes = lambda: None


@control
def captured_again_later(training: Training) -> None:
    """Capture, train two steps, delete the graphs, train an eager step, and recapture."""
    training.helper.create_cudagraphs()
    captured_after = len(training.losses)

    def step() -> None:
        since = len(training.losses) - captured_after
        if since == 2:
            training.helper.delete_cuda_graphs()
        if since == 3:
            training.capture(lambda training: training.helper.create_cudagraphs())
        Training.step(training)
        assert bool(training.replayed) == (since != 2)

    training.patches.enter_context(mock.patch.object(training, "step", step))


@control
def evaluation_eager_on_one_rank(training: Training) -> None:
    """Capture; from the second evaluation on, a hook makes the last rank evaluate eagerly."""
    training.helper.create_cudagraphs()
    last, since = dist.get_rank() == dist.get_world_size() - 1, len(training.evaluations)

    def evaluate() -> None:
        hooked = last and len(training.evaluations) > since
        handle = training.layers[1].mlp.register_forward_hook(lambda *_: None) if hooked else None
        Training.evaluate(training)
        assert bool(training.evaluation_replays[-1]) is not hooked
        if handle is not None:
            handle.remove()

    training.patches.enter_context(mock.patch.object(training, "evaluate", evaluate))


@control
def failed_capture_for_evaluation(training: Training) -> None:
    """Run out of memory on the last rank in the first evaluation capture. All ranks must then evaluate eagerly."""
    _fail_for_evaluation(training, torch.cuda.is_current_stream_capturing)


@control
def failed_warm_up_for_evaluation(training: Training) -> None:
    """Run out of memory in evaluation warm-up, between the collectives of attention and MLP."""
    from megatron.core.transformer.cuda_graphs import is_graph_capturing

    graphs = getattr(training.chunks[0].module, "graphs", None)
    _fail_for_evaluation(training, lambda: is_graph_capturing() or (graphs is not None and graphs.captured is not None))


def _fail_for_evaluation(training: Training, fails: Callable[[], bool]) -> None:
    from megatron.core import parallel_state

    mlp = training.layers[-1].mlp
    forward = mlp.forward

    def fail(*args, **kwargs):
        if fails():
            raise torch.OutOfMemoryError("simulated: out of memory")
        return forward(*args, **kwargs)

    training.helper.create_cudagraphs()
    training.chunks[0].synchronize_param_gather()
    before = training_state(training)
    last = dist.get_rank() == dist.get_world_size() - 1
    with mock.patch.object(mlp, "forward", fail) if last else nullcontext():
        training.evaluate()
    training.chunks[0].synchronize_param_gather()  # as the schedules do at the end of an evaluation
    after = training_state(training)
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    assert stages > 1 or not any(training.evaluation_replays)  # other stages replay
    changed = [key for key in before if before[key] != after[key]]
    # TransformerEngine's attention advances the generator even without dropout.
    assert changed == [] or (changed == ["rng"] and training.case.transformer_engine), (
        f"a failed capture changed {changed}"
    )
    training.evaluations.clear()  # the eager run does not evaluate here
    training.evaluation_replays.clear()


@control
def not_reduced_across_replicas(training: Training) -> None:
    """Capture, then skip gradient reduction across HSDP replicas."""
    _not_across_replicas(training, "grad_reduce_pipeline", "reduce_all_across_replicas")


@control
def not_gathered_across_replicas(training: Training) -> None:
    """Capture, then skip parameter gathering across HSDP replicas."""
    _not_across_replicas(training, "all_gather_pipeline", "gather_across_replicas")


def _not_across_replicas(training: Training, pipeline: str, method: str) -> None:
    training.helper.create_cudagraphs()
    owner = getattr(training.chunks[0].module, pipeline)
    training.patches.enter_context(mock.patch.object(owner, method))


@control
def captured_by_two_helpers(training: Training) -> None:
    """Capture the first layer with one helper and all other layers with another, as multimodal models do."""
    from megatron.core.transformer import cuda_graphs

    first, *rest = training.layers
    for layers in (rest, [first]):
        with mock.patch.object(cuda_graphs, "_layer_is_graphable", lambda layer, _, some=layers: layer in some):
            training.make_helper()
        training.helper.create_cudagraphs()


@control
def failed_language_capture(training: Training) -> None:
    """Capture the vision encoder, then fail to capture the language model."""
    vision = training.helper.vision
    vision.create_cudagraphs()
    training.helper = training.helper.language
    training.helper.vision = vision
    failed_backward_capture(training)


@control
def beside_a_larger_model(training: Training) -> None:
    """Capture, then train a second, larger model with its own graphs.

    After each forward pass of the first model, the second trains one step.
    """
    case = replace(training.case, hidden=2 * training.case.hidden)
    training.helper.create_cudagraphs()
    other = Training(case, graphs=True)
    other.make_helper()
    training.patches.callback(lambda: other.helper.graphs_created() and other.helper.delete_cuda_graphs())

    def losses(*args: Any) -> torch.Tensor:
        computed = Training._losses(training, *args)
        if len(other.losses) == case.warmup:
            other.capture(lambda other: other.helper.create_cudagraphs())
        other.step()
        assert bool(other.replayed) == (len(other.losses) > case.warmup)
        return computed

    training.patches.enter_context(mock.patch.object(training, "_losses", losses))


@control
def taken_addresses(training: Training) -> None:
    """Capture, then reuse the memory of parameter buffers that Megatron-FSDP freed."""
    training.helper.create_cudagraphs()
    groups = training.chunks[0].module.param_and_grad_buffer.parameter_groups
    training.taken = [
        torch.empty(group.model_weight_buffer.bucket_index.size, dtype=group.model_weight_buffer.dtype, device="cuda")
        for group in groups * 4
    ]


@control
def dead_local_replay(training: Training) -> None:
    """Make replays of local graphs do nothing."""
    from megatron.core.pipeline_parallel import schedules

    create = schedules.create_cudagraphs

    def kill() -> None:
        create()
        for runner in local_runners(training.layers):  # on instances, because training steps patch the class
            runner.fwd_graph, runner.bwd_graph = mock.Mock(kept=runner.fwd_graph), mock.Mock(kept=runner.bwd_graph)

    training.patches.enter_context(mock.patch.object(schedules, "create_cudagraphs", kill))


def _fail_capture(training: Training, touch: Callable[[torch.Tensor], object]) -> None:
    def hook(module, args, output):
        touch(output[0] if isinstance(output, tuple) else output)

    handle = training.layers[-1].mlp.register_forward_hook(hook)
    with _unchanged_state(training), suppress(RuntimeError):
        training.helper.create_cudagraphs()
    handle.remove()
    assert not training.helper.graphs_created(), "the capture should have failed"


@contextmanager
def _unchanged_state(training: Training) -> Iterator[None]:
    before = training_state(training)
    yield
    after = training_state(training)
    assert before == after, f"a failed capture changed {[key for key in before if before[key] != after[key]]}"


def training_state(training: Training) -> dict[str, object]:
    """Return the process and model state that must survive a failed capture."""
    from megatron.core.tensor_parallel.random import get_all_rng_states
    from megatron.core.transformer.cuda_graphs import is_graph_capturing

    layers = training.layers
    fsdp = training.chunks[0].module
    return {
        "capturing": (is_graph_capturing(), torch.cuda.is_current_stream_capturing()),
        "stream": torch.cuda.current_stream().cuda_stream,
        "rng": [torch.cuda.get_rng_state().tolist()]
        + [state.get_state().tolist() for state in get_all_rng_states().values()],
        "cpu_rng": torch.get_rng_state().tolist(),
        "gc": gc.isenabled(),
        "environment": dict(os.environ),
        "hooks": [
            [(name, list(value.items())) for name, value in vars(module).items() if "_hooks" in name and value]
            for layer in layers
            for module in layer.modules()
        ],
        "graphs": [list(layer.cuda_graphs) for layer in layers],
        "parameters": [(name, id(param)) for name, param in training.chunks[0].named_parameters()],
        "gradients": [param.grad is None for param in training.chunks[0].parameters()],
        "distributed": getattr(fsdp, "is_param_fsdp_distributed", None),
        "captured": hasattr(fsdp, "fsdp_hooks") and fsdp.graphs.captured is not None,
    }
