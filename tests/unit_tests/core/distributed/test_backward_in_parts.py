"""Test the reduction of gradients that several autograd passes accumulate.

With ``--overlap-moe-expert-parallel-comm``, the embedding and a tied output layer have separate autograd passes, which
add to one gradient. A reduction before the last pass would read memory that this pass writes.
"""

from unittest import mock

import pytest
import torch

from .fsdp_variants import STRATEGIES, Variant, run_backward, small


@pytest.fixture(params=STRATEGIES)
def fsdp(ranks, request):
    return Variant(small(data_parallel_sharding_strategy=request.param, fsdp_double_buffer=False)).build().module


def test_shared_gradients_are_reduced_once_after_all_parts(fsdp):
    fsdp.zero_grad_buffer()
    fsdp._replace_param_with_raw_if_needed()
    embedding = fsdp.module.embedding.word_embeddings.weight
    shared = fsdp.param_and_grad_buffer.param_to_param_group[embedding]
    pipeline, reduced = fsdp.grad_reduce_pipeline, []

    def note(group, *args, **kwargs):
        reduced.extend(group)
        return reduce(group, *args, **kwargs)

    reduce = pipeline._bucket_group_gradient_reduce
    fsdp.is_last_microbatch = True
    with mock.patch.object(pipeline, "_bucket_group_gradient_reduce", note):
        fsdp.pre_backward()
        run_backward(fsdp, small())  # a pass through the layers, and one through the embedding
        assert shared not in reduced
        once = embedding.grad.clone()
        embedding.sum().backward()
        assert torch.equal(embedding.grad, once + 1)
        assert shared not in reduced
        fsdp.post_backward()
    assert sorted(reduced) == [*range(pipeline.num_buckets)]
