"""Training without collectives: none is launched in the context, and all are outside it."""

import torch

from benchmarks._step_time.resident import COLLECTIVES, without_collectives


def test_a_collective_leaves_its_output_as_it_is_and_is_over():
    output, given = torch.zeros(4), torch.ones(2)
    with without_collectives():
        assert torch.distributed.all_gather_into_tensor(output_tensor=output, input_tensor=given) is None
        work = torch.distributed.reduce_scatter_tensor(output=given, input=output, async_op=True)
        assert work is not None and work.wait()
    assert output.tolist() == [0.0] * 4
    assert given.tolist() == [1.0] * 2


def test_collectives_are_those_of_torch_again_after_an_error():
    before = [getattr(torch.distributed, name) for name in COLLECTIVES]
    try:
        with without_collectives():
            assert getattr(torch.distributed, COLLECTIVES[0]) is not before[0]
            raise ValueError
    except ValueError:
        pass
    assert [getattr(torch.distributed, name) for name in COLLECTIVES] == before
