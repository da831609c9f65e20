"""Buckets that graphs use are noted at capture; before a replay they must still go where they went."""

import pytest
import torch

from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.recorded_passes import places
from megatron.core.transformer._cuda_graphs.errors import ChangedSinceCaptureError
from megatron.core.transformer._cuda_graphs.snapshot import Snapshot


class Bucket:
    def __init__(self, data):
        self.data = data


class UndividedBuffer:
    """A ``DataParallelBuffer`` of one rank: its buckets are parts of its data."""

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
    snapshot = Snapshot("", places(named, dtype))
    for buffer in buffers:
        buffer.fetched = 0
    return snapshot


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_nothing_is_fetched_where_buckets_are_parts_of_data_that_stays(dtype):
    buffers = [UndividedBuffer(4), UndividedBuffer(8)]
    noted(buffers, dtype).check()
    assert [buffer.fetched for buffer in buffers] == [0, 0]


def test_data_that_was_replaced_is_an_error():
    buffers = [UndividedBuffer(4), UndividedBuffer(8)]
    snapshot = noted(buffers)
    kept, buffers[1].data = buffers[1].data, torch.zeros(8)
    with pytest.raises(ChangedSinceCaptureError, match=r"bucket 1 \(0x"):
        snapshot.check()
    buffers[1].data = kept[:]  # another tensor in the same place
    snapshot.check()
    assert buffers[1].fetched == 2


def test_a_bucket_of_another_dtype_is_fetched_to_be_compared():
    buffer = UndividedBuffer(4)
    snapshot = noted([buffer], torch.bfloat16)
    snapshot.check()
    assert buffer.fetched == 1
    buffer.other = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(ChangedSinceCaptureError):
        snapshot.check()
