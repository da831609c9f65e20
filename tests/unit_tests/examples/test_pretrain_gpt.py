"""Test pretrain_gpt.py and step_metrics.py without a training run."""

import inspect
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch

from megatron.training import training

NO_CHECKS = SimpleNamespace(check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=False)


@pytest.fixture
def pretrain_gpt(examples):
    import pretrain_gpt

    return pretrain_gpt


@pytest.fixture
def metrics(examples, tmp_path, monkeypatch):
    """Return step metrics with a fake clock."""
    import step_metrics

    seconds = iter(range(100))
    monkeypatch.setattr(step_metrics.time, "perf_counter", lambda: next(seconds) / 4)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return step_metrics.StepMetrics(tmp_path / "metrics.jsonl")


def lines(metrics) -> list[dict]:
    return [json.loads(line) for line in metrics.path.read_text().splitlines()]


@pytest.mark.long
def test_script_can_be_imported_without_the_patch(examples):
    environment = os.environ | {"MEGATRON_FSDP_CUDA_GRAPHS": "0"}
    done = subprocess.run(
        [sys.executable, "-c", "import pretrain_gpt"], cwd=examples, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_loss_ignores_masked_tokens(pretrain_gpt, monkeypatch):
    monkeypatch.setattr(pretrain_gpt, "get_args", lambda: NO_CHECKS)
    mask = torch.tensor([[1.0, 0.0, 1.0]])
    loss, tokens, report = pretrain_gpt.loss_func(mask, torch.tensor([[1.0, 100.0, 2.0]], dtype=torch.bfloat16))
    assert (loss.item(), tokens.item()) == (3.0, 2)
    assert report["lm loss"].tolist() == [3.0, 2.0]
    assert report["lm loss"].dtype == torch.float32


@pytest.mark.parametrize("name", ["micro_batch_size", "context_parallel_size"])
def test_inter_document_masking_needs_one_row(pretrain_gpt, monkeypatch, name):
    sizes = dict.fromkeys(pretrain_gpt.ONE_ROW, 1) | {name: 2}
    args = SimpleNamespace(dataloader_inter_document_masking=True, **sizes)
    monkeypatch.setattr(pretrain_gpt, "parse_and_validate_args", lambda: args)
    with pytest.raises(SystemExit, match=f"masking needs --{name.replace('_', '-')} 1"):
        pretrain_gpt.main()


def test_metrics_are_exact(metrics):
    loss = torch.tensor(1.1)
    metrics.record(1, {"lm loss": loss}, 0.1, skipped=False)
    metrics.record(2, {"lm loss": loss}, 0.1, skipped=True)
    first, second = lines(metrics)
    assert first["loss"] == float.fromhex(first["loss_hex"]) == loss.item()
    assert first["grad_norm"] == float.fromhex(first["grad_norm_hex"]) == 0.1
    assert (first["ms"], second["ms"]) == (None, 250.0)
    assert (first["skipped"], second["skipped"]) == (False, True)


def test_training_log_is_recorded_and_called(metrics, monkeypatch):
    signature = inspect.signature(training.training_log)
    calls = []

    def training_log(*args, **kwargs):
        calls.append((args, kwargs))
        return "report memory"

    monkeypatch.setattr(training_log, "__signature__", signature, raising=False)
    monkeypatch.setattr(training, "training_log", training_log)
    monkeypatch.setattr("step_metrics.is_last_rank", lambda: True)
    metrics.record_training_log()
    given: dict[str, Any] = dict.fromkeys(signature.parameters)
    given |= {"iteration": 5, "loss_dict": {}, "grad_norm": 2.0, "skipped_iter": 0}
    assert training.training_log(**given) == "report memory"
    assert len(calls) == 1
    assert [(line["step"], line["grad_norm"]) for line in lines(metrics)] == [(5, 2.0)]
