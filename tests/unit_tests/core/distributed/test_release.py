"""Test that ``release`` frees all memory of graphs and communication buffers of this rank."""

import gc

import pytest
import torch

from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import get_global_memory_buffer
from megatron.core.tensor_parallel.random import get_all_rng_states, model_parallel_cuda_manual_seed
from megatron.core.transformer._cuda_graphs.errors import CallOrderError, CaptureFailedError
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

from .captured_training import CapturedModel, captured, graphed, in_use


def communication_buffers(fsdp):
    """Return the allocated communication buffers of a model, including buffers of gathered parameters."""
    groups = fsdp.param_and_grad_buffer.parameter_groups
    buffers = [buffer for group in groups for buffer in (group.model_weight_buffer, group.main_grad_buffer)]
    names = tuple({f"{buffer.temporary_bucket_allocator.name}_" for buffer in buffers})
    return [memory for (name, _), memory in get_global_memory_buffer().buffer.items() if name.startswith(names)]


def graph_pools():
    """Return the ids of all graph memory pools with allocated segments."""
    return {segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()}


@pytest.mark.parametrize("holds", ["model", "layer"])
def test_release_frees_graphs_and_buffers(ranks, side_stream, holds):
    before = graph_pools()  # of other tests
    model = CapturedModel(graphed(holds))
    model.step()
    buffers, params = communication_buffers(model.fsdp), [*model.fsdp.raw_param.values()]
    assert buffers and graph_pools() - before
    model.helper.release()
    assert not graph_pools() - before
    assert communication_buffers(model.fsdp) == []
    assert [param.untyped_storage().nbytes() for param in (*params, *buffers)] == [0] * len([*params, *buffers])
    assert in_use(model.fsdp) == [{}, {}]


def test_buffers_of_eager_passes_are_freed_again(ranks, side_stream):
    model = CapturedModel(graphed("model"))
    replaced = model.fsdp.module.forward
    model.fsdp.module.forward = lambda *args, **kwargs: replaced(*args, **kwargs)  # outlives the graphs
    model.helper.release()
    model.step()
    assert communication_buffers(model.fsdp)
    model.helper.release()
    assert communication_buffers(model.fsdp) == []
    model.helper.restore()
    assert model.helper.graphs_created()
    model.step()
    model.helper.delete_cuda_graphs()


def test_new_seeds_reach_graphs_without_their_helper(ranks, side_stream):
    model = CapturedModel(graphed("model"))
    states = get_all_rng_states()
    del model.helper
    gc.collect()
    model_parallel_cuda_manual_seed(5, use_cudagraphable_rng=True, force_reset_rng=True)
    assert get_all_rng_states() != states
    model.step()
    assert get_all_rng_states() == states


def test_release_before_the_capture_leaves_it_to_the_caller(ranks, side_stream):
    model = CapturedModel(graphed("layer"))
    model.helper.delete_cuda_graphs()
    model.helper.release()
    model.helper.restore()
    assert not model.helper.graphs_created() and not model.helper.before_step()
    model.helper.create_cudagraphs()
    model.helper.release()
    assert model.helper.before_step()  # so that training loops do not capture
    with pytest.raises(CallOrderError, match="released: call restore"):
        model.helper.create_cudagraphs()


@pytest.mark.parametrize("holds", ["model", "layer"])
def test_second_helper_of_a_model_with_graphs_is_refused(ranks, side_stream, holds):
    with captured(graphed(holds)) as model:
        second = TECudaGraphHelper([model.model], model.model.config, model.case.sequence, model.case.micro_batch)
        with pytest.raises(CallOrderError, match=r"another helper has graphs of this model: call its delete_cuda_gr"):
            second.create_cudagraphs()
        model.step()


def test_restore_in_evaluation_mode_is_refused(ranks, side_stream):
    with captured(graphed("layer")) as model:
        model.helper.release()
        model.model.eval()
        with pytest.raises(CaptureFailedError, match=r"evaluation mode: call model\.train\(\), then create_cudagraphs"):
            model.helper.restore()
        model.model.train()
        model.helper.create_cudagraphs()
        model.step()


def test_offloaded_weights_are_neither_saved_nor_updated(ranks, side_stream):
    model = CapturedModel(graphed("layer"))
    buffer = model.fsdp.param_and_grad_buffer
    buffer.offload_main_weights()
    for read in (model.fsdp.state_dict, buffer.update_main_grads, buffer.copy_main_weights_to_model_weights):
        with pytest.raises(RuntimeError, match="call optimizer"):
            read()
    buffer.restore_main_weights()
    model.step()
