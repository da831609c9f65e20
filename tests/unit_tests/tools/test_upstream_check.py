"""Test that upstream_check.py reports changes of megatron-core that break the patch."""

import pytest

from tests.support.linked_core import ADAPTER, FSDP, change, later_core, linked_core
from tools import upstream_check as cli

LAYER = "megatron/core/transformer/module.py"
REPLACED = "megatron/core/transformer/cuda_graphs.py"


@pytest.fixture
def other(tmp_path):
    """Return a megatron-core folder of links to the installed files. To edit a file, tests call ``change``."""
    return linked_core(tmp_path)


def checked(folder, capsys):
    status = cli.main([str(folder)])
    return status, capsys.readouterr().out


def test_installed_version_breaks_nothing(other, capsys):
    assert checked(other, capsys) == (0, "0 would break, 0 to review\n")


def test_breaking_changes_are_reported(other, capsys):
    change(
        other,
        FSDP,
        ("def setup_delayed_wgrad_acc_hook", "def set_up_hook"),
        ("_register_fsdp_hooks", "_register_hooks"),
    )
    (other / "megatron/core/num_microbatches_calculator.py").unlink()
    change(other, ADAPTER, ("def _get_dp_tp_mesh(dp_cp_group", "def _get_dp_tp_mesh(layout, dp_cp_group"))
    importing = "from megatron.core.transformer.cuda_graphs import is_graph_capturing, graph_of_next_year"
    change(other, LAYER, ("import torch\n", f"import torch\n{importing}\n"))
    status, text = checked(other, capsys)
    assert status == 1
    for message in (
        f"removed: {FSDP[:-3].replace('/', '.')}.setup_delayed_wgrad_acc_hook (core/distributed/fsdp/src/",
        "removed: megatron.core.num_microbatches_calculator.get_num_microbatches (core/transformer/module.py:",
        "removed, so the override is never called: ",
        "MegatronFSDP._register_fsdp_hooks",
        "other parameters (dp_cp_group, tp_group, ep_size=1 -> layout, dp_cp_group, tp_group, ep_size=1): ",
        "not in the patch: megatron.core.transformer.cuda_graphs.graph_of_next_year",
    ):
        assert message in text
    assert "cuda_graphs.is_graph_capturing" not in text


def test_changes_to_review_are_listed(other, capsys):
    forward = "def forward(self, *inputs, **kwargs):"
    change(other, FSDP, (forward, forward.replace("*inputs", "*inputs, step") + "\n        1 + 1"))
    change(other, REPLACED, ("def is_graph_capturing", "def is_new(): ...\ndef is_graph_capturing"))
    status, text = checked(other, capsys)
    assert status == 0
    assert "Overridden code that changed, to review:\n  megatron.core" in text
    assert "MegatronFSDP.forward" in text
    assert "new: megatron.core.transformer.cuda_graphs.is_new" in text


def test_later_version_does_not_break(tmp_path, capsys):
    status, text = checked(later_core(tmp_path), capsys)
    assert status == 0
    assert "FullyShardedDataParallel.__init__ (" in text and "MegatronFSDP._register_fsdp_hooks (" in text
    assert text.endswith("0 would break, 2 to review\n")


def test_folder_without_megatron_core_fails(tmp_path, capsys):
    assert cli.main([str(tmp_path)]) == 2
    assert f"{tmp_path} has no megatron/core" in capsys.readouterr().err
