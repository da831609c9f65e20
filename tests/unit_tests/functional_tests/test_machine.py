"""Selection of the cases that a machine can run."""

import pytest
import torch

from tests.functional_tests._runner.machine import Machine, this_machine


def test_machine_is_named_after_its_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for device, name in {
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100",
        "A100-SXM4-80GB": "a100_sxm4_80gb",
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=device: device)
        assert this_machine() == Machine(4, name)


@pytest.mark.parametrize(
    ("gpus", "attributes", "reason"),
    [
        (2, {}, None),
        (1, {}, "needs 2 GPUs, 1 are visible"),
        (2, {"needs": ("json", "no_such_package")}, "needs no_such_package, which cannot be imported"),
        (0, {"on_cpu": True}, None),
        (2, {"on_cpu": True}, "the CPU backend needs CUDA_VISIBLE_DEVICES="),
    ],
)
def test_missing_requirement_is_named(make_case, gpus, attributes, reason):
    assert Machine(gpus, "h200").cannot_run(make_case(**attributes)) == reason
