"""Test that replays reject buckets that have moved since capture."""

import pytest
import torch

from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.recorded_passes import places
from megatron.core.transformer._cuda_graphs.errors import ChangedSinceCaptureError
from megatron.core.transformer._cuda_graphs.snapshot import Snapshot


class Bucket:
    def __init__(self, data):
        self.data = data


class UndividedBuffer:
    """A ``DataParallelBuffer`` of one rank, whose buckets are views of its data."""

    is_data_distributed, dtype = False, torch.float32
    temporary_bucket_allocator = None

    def __init__(self, size):
        self.data, self.other, self.fetched = torch.zeros(size), torch.zeros(3, dtype=torch.bfloat16), 0

    def fetch_bucket(self, dtype=None):
        self.fetched += 1
        return Bucket(self.data[1:] if dtype in (None, self.dtype) else self.other)

    def free_bucket_storage(self):
        pass


def noted(buffers, dtype=None):
    named = {f"bucket {index}": buffer for index, buffer in enumerate(buffers)}
    snapshot = Snapshot("", *places(named, dtype))
    for buffer in buffers:
        buffer.fetched = 0
    return snapshot


def test_replaced_buffer_data_is_an_error():
    buffers = [UndividedBuffer(4), UndividedBuffer(8)]
    snapshot = noted(buffers)
    snapshot.check()
    kept, buffers[1].data = buffers[1].data, torch.zeros(8)
    with pytest.raises(ChangedSinceCaptureError, match=r"bucket 1 \(0x"):
        snapshot.check()
    buffers[1].data = kept[:]  # a different tensor at the same address
    snapshot.check()
    assert [buffer.fetched for buffer in buffers] == [0, 0]


def test_buckets_of_another_dtype_are_compared_by_fetching():
    buffer = UndividedBuffer(4)
    snapshot = noted([buffer], torch.bfloat16)
    snapshot.check()
    assert buffer.fetched == 1
    buffer.other = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(ChangedSinceCaptureError):
        snapshot.check()
