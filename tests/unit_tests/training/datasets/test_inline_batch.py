"""Batches of a data loader's workers arrive as torch's do, without asking for the memory of small tensors."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.multiprocessing import reductions
from torch.utils.data import DataLoader, Dataset, default_collate

from megatron.training.datasets import data_samplers
from megatron.training.datasets.inline_batch import LARGE, collate


class Samples(Dataset):
    """Dictionaries of tensors, or what ``make`` makes of them."""

    def __init__(self, make=lambda sample: sample):
        self._make = make

    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 5)
        sample = {
            "tokens": tokens,
            "mask": tokens % 2 == 0,
            "weights": tokens / 3,
            "half": (tokens / 3).to(torch.bfloat16),
            "number": torch.tensor(index, dtype=torch.int16),
            "none": torch.empty(0, 3),
            "large": torch.full((LARGE // 2,), index, dtype=torch.int8),
        }
        return self._make(sample)


def as_list(sample):
    return [*sample.values()]


def with_text(sample):
    return sample | {"text": "words"}


def batches_of(dataset, collate_fn, workers=2):
    return list(DataLoader(dataset, batch_size=2, num_workers=workers, collate_fn=collate_fn))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_torch(workers):
    found, expected = (batches_of(Samples(), collate_fn, workers) for collate_fn in (collate, default_collate))
    assert len(found) == len(expected) == 4
    for batch, usual in zip(found, expected, strict=True):
        assert type(batch) is dict
        assert list(batch) == list(usual)
        for name, tensor in usual.items():
            assert batch[name].dtype == tensor.dtype
            assert batch[name].shape == tensor.shape
            assert batch[name].is_contiguous()
            assert batch[name].equal(tensor)


@pytest.mark.parametrize(("collate_fn", "asked"), [(default_collate, 6), (collate, 1)])
def test_the_process_asks_for_the_memory_of_large_tensors_only(collate_fn, asked):
    batches = iter(DataLoader(Samples(), batch_size=2, num_workers=1, collate_fn=collate_fn))
    rebuild = reductions.rebuild_storage_fd  # which workers name in what they send
    with mock.patch.object(reductions, "rebuild_storage_fd", side_effect=rebuild) as rebuilt:
        next(batches)
    assert rebuilt.call_count == asked


def test_a_tensor_that_arrived_may_be_written_to():
    batch = batches_of(Samples(), collate)[0]
    for tensor in batch.values():
        assert tensor.fill_(1).eq(1).all()


@pytest.mark.parametrize("make", [as_list, with_text])
def test_other_batches_are_left_to_torch(make):
    found, expected = (batches_of(Samples(make), collate_fn)[0] for collate_fn in (collate, default_collate))
    assert type(found) is type(expected)
    found, expected = ([*batch.values()] if isinstance(batch, dict) else batch for batch in (found, expected))
    for value, usual in zip(found, expected, strict=True):
        assert value.equal(usual) if torch.is_tensor(usual) else value == usual


def loader_with(monkeypatch, dataset=None, **options):
    usual = {
        "dataloader_type": "single",
        "full_validation": False,
        "hybrid_context_parallel": False,
        "micro_batch_size": 2,
        "global_batch_size": 2,
        "num_workers": 2,
        "exit_signal_handler": False,
    }
    monkeypatch.setattr(data_samplers, "get_args", lambda: SimpleNamespace(**(usual | options)))
    monkeypatch.setattr(data_samplers.mpu, "get_data_parallel_rank", lambda: 0)
    monkeypatch.setattr(data_samplers.mpu, "get_data_parallel_world_size", lambda: 1)
    return data_samplers.build_pretraining_data_loader(Samples() if dataset is None else dataset, 0)


def test_megatrons_loaders_send_batches_inline(monkeypatch):
    loader = loader_with(monkeypatch)
    assert loader.collate_fn is collate
    assert next(iter(loader))["tokens"].tolist() == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]


def test_loaders_without_workers_or_of_users_are_left_alone(monkeypatch):
    assert loader_with(monkeypatch, num_workers=0).collate_fn is default_collate
    hybrid = loader_with(monkeypatch, hybrid_context_parallel=True, dataloader_type="cyclic", data_sharding=False)
    assert hybrid.collate_fn is not collate
    own = DataLoader(Samples(), num_workers=2)
    assert loader_with(monkeypatch, own, dataloader_type="external") is own
    assert own.collate_fn is default_collate
    assert data_samplers.build_pretraining_data_loader(None, 0) is None
