"""Test that the graphs of one recording share static tensors and memory."""

from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron.core.transformer._cuda_graphs import snapshot
from megatron.core.transformer.cuda_graphs import CudaGraphManager, _CudagraphGlobalRecord
from megatron_fsdp_cuda_graphs.cpu_backend.memory import pool_of

from .local_graph_cases import HIDDEN, batch, record, runners, stack

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


class CopiesInto(TorchFunctionMode):
    """Counts copies into one tensor."""

    def __init__(self, tensor):
        super().__init__()
        self.tensor, self.count = tensor, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.Tensor.copy_ and args[0] is self.tensor
        return func(*args, **(kwargs or {}))


class TestBuffers:
    def test_shared_input_is_copied_once(self):
        model = stack()
        scale = torch.ones(1, HIDDEN).cuda()
        record(model, scale=scale)
        places = {runner.graphs.static_inputs[1][0] for runner in runners(model)}
        assert len(places) == 1
        (place,) = places
        unnoticed = mock.patch.dict(snapshot.CONTEXTS, {"TorchFunctionMode": lambda: 0})
        with unnoticed, CopiesInto(place.tensor) as copies:
            model(batch(1), scale=scale.clone())
        assert copies.count == 1

    def test_splitting_a_shared_input_is_refused(self):
        model = stack()
        one, two = torch.ones(1, HIDDEN).cuda(), torch.ones(1, HIDDEN).cuda()
        record(model, scale=one)
        x = model.before(batch(1))
        x, _ = model.layers[0](x, scale=one)
        with pytest.raises(RuntimeError, match=r"layer 2 .*is not the tensor of the recorded step"):
            model.layers[1](x, scale=two)

    def test_replacing_the_previous_output_is_refused(self):
        model = stack()
        record(model)
        x, _ = model.layers[0](model.before(batch(1)))
        with pytest.raises(RuntimeError, match="is not the tensor of the recorded step"):
            model.layers[1](x.clone())

    def test_later_captures_reuse_memory(self):
        model = stack()
        record(model)
        # Weak references have their own storage, which is not in the pool of the graphs.
        owned = pool_of(CudaGraphManager.global_mempool)._owned
        for runner in runners(model):
            slot = runner.graphs
            tensors = [*slot.inputs, *slot.outputs, *slot.grad_inputs, *slot.grad_params]
            kept = [tensor for tensor in tensors if tensor is not None and tensor.untyped_storage()._cdata in owned]
            assert len(kept) == (runner.base_module is model.layers[0])  # the gradient passed to eager code

    def test_static_memory_is_free_after_capture(self):
        record(stack(), scale=torch.ones(1, HIDDEN).cuda())
        pool = _CudagraphGlobalRecord.recording.buffers.pool
        assert len(pool.pool) == len(pool.tensor_strong_refs)
