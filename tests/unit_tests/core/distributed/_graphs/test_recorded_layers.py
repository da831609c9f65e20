"""All layers of a decoder in one graph: what replays find before, and what they leave."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs import runners
from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.collectives import RecordedReduction
from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.pipelines import prepared
from megatron.core.distributed.fsdp.src.megatron_fsdp.optimizer_gradients import GradientStorages
from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import AllGatherPipeline

from ..captured_training import WARMED_UP, captured, graphed
from ..fsdp_variants import small

FLAGS = ("--fsdp-double-buffer", "--fsdp-db-use-persist-buf-on-alloc-fail")


@contextmanager
def taken(fsdp, kind):
    """Someone else holds one of the two buffers for parameters or for gradients."""
    group = next(group for group in fsdp.param_and_grad_buffer.parameter_groups if group.fsdp_unit_id is not None)
    idle = getattr(group, kind).temporary_bucket_allocator.idle_buffer
    idle.remove((0, 0))
    yield
    idle.append((0, 0))


def test_the_hooks_of_layers_do_not_run_in_a_replay(ranks):
    with captured(graphed()) as training:
        training.step()
        graphs = training.fsdp.graphs
        with mock.patch.object(graphs, "runner_of", wraps=graphs.runner_of) as asked:
            training.step()
        modules = {call.args[0] for call in asked.call_args_list}
        assert modules  # the embedding, say
        assert modules.isdisjoint(training.layers)


def test_only_recorded_layers_are_prefetched_by_them(ranks):
    gathered = []
    gather = AllGatherPipeline.async_bucket_gather

    def note(pipeline, bucket_id, bwd):
        if torch.cuda.is_current_stream_capturing():
            gathered.append(bucket_id)
        return gather(pipeline, bucket_id, bwd)

    noting = mock.patch.object(AllGatherPipeline, "async_bucket_gather", note)
    with noting, captured(graphed("decoder", mtp=1)) as training:
        units = training.fsdp.graphs.units
        buckets = [bucket for layer in training.layers for bucket in units[layer].buckets]
    assert gathered[: 2 * len(buckets)] == [*buckets, *reversed(buckets)]


def test_an_eager_pass_gathers_what_the_graphs_gather_that_other_ranks_replay(ranks):
    with captured(graphed("decoder", mtp=1)) as training:
        hooks, gathers = training.fsdp.fsdp_hooks, training.fsdp.all_gather_pipeline
        groups = training.fsdp.param_and_grad_buffer.parameter_groups
        forward = [bucket for layer in training.layers for bucket in hooks.graphs.units[layer].buckets]
        training.layers[1].mlp.register_forward_hook(lambda *_: None)
        with mock.patch.object(gathers, "async_bucket_gather", wraps=gathers.async_bucket_gather) as gather:
            training.step()
        gathered = [bucket for bucket, _ in (call.args for call in gather.call_args_list)]
        # The unit after the layers replays a graph of its own, and in backward gathers the last layer ahead: in vain.
        of_units = [bucket for bucket in gathered if groups[bucket].fsdp_unit_id is not None]
        assert of_units == [*forward, forward[-1], *reversed(forward)]


@pytest.mark.parametrize("holds", ["decoder", "model"])
def test_an_eager_pass_reduces_the_buckets_of_a_layer_together_as_graphs_do(ranks, holds):
    with captured(graphed(holds, experts=4, moe_expert_capacity_factor=1.0)) as training:
        units, reductions = training.fsdp.graphs.units, training.fsdp.grad_reduce_pipeline
        training.layers[1].mlp.register_forward_hook(lambda *_: None)
        with mock.patch.object(reductions, "reduce_gradients", wraps=reductions.reduce_gradients) as reduce:
            training.step()
        together = [{*call.args[0]} for call in reduce.call_args_list]
        for layer in training.layers:
            assert len(units[layer].buckets) == 2
            assert {*units[layer].params} in together


@pytest.mark.parametrize("modules", [[], ["attn", "moe_router"], ["moe_router"]], ids=str)
def test_an_eager_pass_of_a_layer_reduces_in_the_order_of_the_replays_of_other_ranks(ranks, modules):
    parts = {"modules": modules} if modules else {"moe_expert_capacity_factor": 1.0}
    with captured(graphed("layer", experts=4, **parts)) as training:
        launch, reduced = RecordedReduction.launch, []

        def noting(reduction):
            reduced.append(reduction.buckets)
            return launch(reduction)

        with mock.patch.object(RecordedReduction, "launch", noting):
            training.step()
            replayed, reduced = reduced, []
            assert len(replayed) == 2 * len(training.layers)
            for layer in training.layers[1:]:
                layer.mlp.router.register_forward_hook(lambda *_: None)
            training.step()
        assert reduced == replayed


def test_kernels_that_are_captured_before_a_first_step_overwrite_gradients_as_in_eager_steps(ranks):
    with captured(graphed()) as training:
        fsdp, layers = training.fsdp, training.layers
        training.helper.delete_cuda_graphs()
        fsdp._replace_param_with_raw_if_needed()
        params = [param for layer in layers for param in layer.parameters()]
        for param in params:
            del param.overwrite_main_grad  # as if no step had gathered it
        marked: list[torch.nn.Parameter] = []
        runner = runners.Eager.before_backward

        def before_backward(self):
            runner(self)
            marked.extend(param for param in self.module.parameters() if param.overwrite_main_grad)

        with mock.patch.object(runners.Eager, "before_backward", before_backward):
            training.helper.create_cudagraphs()
        assert {*marked} == {*params}


@pytest.mark.parametrize("mtp", [None, 1])
def test_the_optimizers_gradients_stay_among_the_activations_of_one_graph_of_all_units(ranks, mtp):
    case = small(layers=4, holds="decoder", warmup=WARMED_UP, mtp=mtp)
    methods = [mock.patch.object(GradientStorages, name) for name in ("reserve", "adopt", "detach")]
    with methods[0] as reserve, methods[1] as adopt, methods[2] as detach, captured(case) as training:
        assert (reserve.call_count, adopt.call_count) == ((0, 0) if mtp else (1, 1))
        assert not detach.called
        training.fsdp.graphs.forget_graphs(training.layers)
        assert detach.called


def test_after_a_failed_capture_the_optimizers_gradients_stay_in_no_pool(ranks):
    with captured(small(layers=4, holds="decoder", warmup=WARMED_UP)) as training:
        with (
            mock.patch.object(GradientStorages, "detach") as detach,
            pytest.raises(ZeroDivisionError),
            prepared(training.fsdp),
        ):
            raise ZeroDivisionError
        assert detach.called
