"""The check of the patch against another megatron-core, here the installed one with edits."""

import pytest

from tests.support.linked_core import ADAPTER, FSDP, change, later_core, linked_core
from tools import upstream_check as cli

LAYER = "megatron/core/transformer/module.py"
GRAPHS = "megatron/core/transformer/cuda_graphs.py"


@pytest.fixture
def other(tmp_path):
    """Return a megatron-core of links to the installed files."""
    return linked_core(tmp_path)


@pytest.fixture
def run(other, capsys):
    def run():
        status = cli.main([str(other)])
        return status, capsys.readouterr().out

    return run


def test_supported_version_breaks_nothing(run):
    assert run() == (0, "0 would break, 0 to be read again\n")


def test_breaking_changes_are_listed(other, run):
    change(other, FSDP, ("def setup_delayed_wgrad_acc_hook", "def set_up_hook"))
    change(other, FSDP, ("_register_fsdp_hooks", "_register_hooks"))
    change(other, ADAPTER, ("def _get_dp_tp_mesh(dp_cp_group", "def _get_dp_tp_mesh(layout, dp_cp_group"))
    importing = "from megatron.core.transformer.cuda_graphs import is_graph_capturing, graph_of_next_year"
    change(other, LAYER, ("import torch\n", f"import torch\n{importing}\n"))
    (other / "megatron/core/num_microbatches_calculator.py").unlink()
    status, text = run()
    assert status == 1
    assert f"gone: {FSDP[:-3].replace('/', '.')}.setup_delayed_wgrad_acc_hook (core/distributed/fsdp/src/" in text
    assert "gone: megatron.core.num_microbatches_calculator.get_num_microbatches (core/transformer/module.py:" in text
    assert "nobody calls the patch's: " in text
    assert "MegatronFSDP._register_fsdp_hooks" in text
    assert "other parameters (dp_cp_group, tp_group, ep_size=1 -> layout, dp_cp_group, tp_group, ep_size=1): " in text
    assert "not in the patch: megatron.core.transformer.cuda_graphs.graph_of_next_year" in text
    assert "cuda_graphs.is_graph_capturing" not in text


@pytest.mark.parametrize(
    "forward", ["def forward(self, *inputs, step, **kwargs):", "def forward(self, *inputs, **kwargs):\n        1 + 1"]
)
def test_harmless_changes_are_to_be_read_again(other, run, forward):
    change(other, FSDP, ("def forward(self, *inputs, **kwargs):", forward))
    change(other, GRAPHS, ("def is_graph_capturing", "def is_new(): ...\ndef is_graph_capturing"))
    status, text = run()
    assert status == 0
    assert "Changed behind the patch, to be read again:\n  megatron.core" in text
    assert "MegatronFSDP.forward" in text
    assert "new: megatron.core.transformer.cuda_graphs.is_new" in text


def test_known_changes_of_a_later_version_do_not_break(tmp_path, capsys):
    assert cli.main([str(later_core(tmp_path))]) == 0
    text = capsys.readouterr().out
    assert "_allreduce_replicated_grads_over_gtp_remat_group" in text
    # The first gives units to every strategy, the second registers hooks on them.
    assert "FullyShardedDataParallel.__init__ (" in text and "MegatronFSDP._register_fsdp_hooks (" in text
    assert text.endswith("0 would break, 3 to be read again\n")


def test_folder_without_megatron_core_is_named(tmp_path, capsys):
    assert cli.main([str(tmp_path)]) == 2
    assert f"{tmp_path} has no megatron/core" in capsys.readouterr().err
