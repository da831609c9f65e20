"""Check of the patch against copies of the installed megatron-core with one change."""

import pytest

from tests.support.linked_core import ADAPTER, change, later_core, linked_core
from tools import upstream_check as cli

FSDP = "megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py"
LAYER = "megatron/core/transformer/module.py"


@pytest.fixture
def other(tmp_path):
    """A megatron-core of links to the installed files; ``change`` edits a copy of one."""
    return linked_core(tmp_path)


@pytest.fixture
def run(other, capsys):
    def run():
        status = cli.main([str(other)])
        return status, capsys.readouterr().out

    return run


def test_installed_version_breaks_nothing(run):
    assert run() == (0, "0 would break, 0 to review\n")


def test_removed_name_breaks(other, run):
    change(other, FSDP, ("def setup_delayed_wgrad_acc_hook", "def set_up_hook"))
    status, text = run()
    assert status == 1
    assert f"gone: {FSDP[:-3].replace('/', '.')}.setup_delayed_wgrad_acc_hook (core/distributed/fsdp/src/" in text


def test_removed_module_breaks(other, run):
    (other / "megatron/core/num_microbatches_calculator.py").unlink()
    status, text = run()
    assert status == 1
    assert "gone: megatron.core.num_microbatches_calculator.get_num_microbatches (core/transformer/module.py:" in text


def test_removed_overridden_method_breaks(other, run):
    change(other, FSDP, ("_register_fsdp_hooks", "_register_hooks"))
    status, text = run()
    assert status == 1
    assert "so the override is never called: " in text
    assert "MegatronFSDP._register_fsdp_hooks" in text


def test_changed_parameters_break(other, run):
    change(other, ADAPTER, ("def _get_dp_tp_mesh(dp_cp_group", "def _get_dp_tp_mesh(layout, dp_cp_group"))
    status, text = run()
    assert status == 1
    assert "other parameters (dp_cp_group, tp_group, ep_size=1 -> layout, dp_cp_group, tp_group, ep_size=1): " in text


def test_changed_forwarded_parameters_need_a_review(other, run):
    change(other, FSDP, ("def forward(self, *inputs, **kwargs)", "def forward(self, *inputs, step, **kwargs)"))
    status, text = run()
    assert status == 0
    assert "MegatronFSDP.forward" in text


def test_later_version_does_not_break(tmp_path, capsys):
    assert cli.main([str(later_core(tmp_path))]) == 0
    text = capsys.readouterr().out
    assert "_allreduce_replicated_grads_over_gtp_remat_group" in text
    assert "FullyShardedDataParallel.__init__ (" in text and "MegatronFSDP._register_fsdp_hooks (" in text
    assert text.endswith("0 would break, 3 to review\n")


def test_changed_code_needs_a_review(other, run):
    change(
        other, FSDP, ("def forward(self, *inputs, **kwargs):", "def forward(self, *inputs, **kwargs):\n        1 + 1")
    )
    status, text = run()
    assert status == 0
    assert "Changed behind the patch, to review:\n  megatron.core" in text
    assert "MegatronFSDP.forward" in text


def test_import_of_a_missing_name_breaks(other, run):
    importing = "from megatron.core.transformer.cuda_graphs import is_graph_capturing, graph_of_next_year"
    change(other, LAYER, ("import torch\n", f"import torch\n{importing}\n"))
    status, text = run()
    assert status == 1
    assert "not in the patch: megatron.core.transformer.cuda_graphs.graph_of_next_year" in text
    assert "cuda_graphs.is_graph_capturing" not in text


def test_new_definition_needs_a_review(other, run):
    change(
        other,
        "megatron/core/transformer/cuda_graphs.py",
        ("def is_graph_capturing", "def is_new(): ...\ndef is_graph_capturing"),
    )
    status, text = run()
    assert status == 0
    assert "new: megatron.core.transformer.cuda_graphs.is_new" in text


def test_folder_without_megatron_core_fails(tmp_path, capsys):
    assert cli.main([str(tmp_path)]) == 2
    assert f"{tmp_path} has no megatron/core" in capsys.readouterr().err
