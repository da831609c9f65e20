"""The check of the patch against another megatron-core: here the installed one, with one thing changed."""

import pytest

from tests.support.linked_core import ADAPTER, change, later_core, linked_core
from tools import upstream_check as cli

FSDP = "megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py"
LAYER = "megatron/core/transformer/module.py"


@pytest.fixture
def other(tmp_path):
    """A megatron-core of links to the installed files; ``change`` puts an edited copy in the place of one."""
    return linked_core(tmp_path)


@pytest.fixture
def run(other, capsys):
    def run():
        status = cli.main([str(other)])
        return status, capsys.readouterr().out

    return run


def test_the_version_that_the_patch_is_made_for_breaks_nothing(run):
    assert run() == (0, "0 would break, 0 to be read again\n")


def test_a_name_that_is_gone_would_break(other, run):
    change(other, FSDP, ("def setup_delayed_wgrad_acc_hook", "def set_up_hook"))
    status, text = run()
    assert status == 1
    assert f"gone: {FSDP[:-3].replace('/', '.')}.setup_delayed_wgrad_acc_hook (core/distributed/fsdp/src/" in text


def test_a_module_that_is_gone_would_break(other, run):
    (other / "megatron/core/num_microbatches_calculator.py").unlink()
    status, text = run()
    assert status == 1
    assert "gone: megatron.core.num_microbatches_calculator.get_num_microbatches (core/transformer/module.py:" in text


def test_a_method_that_the_patch_overrides_and_nobody_calls_would_break(other, run):
    change(other, FSDP, ("_register_fsdp_hooks", "_register_hooks"))
    status, text = run()
    assert status == 1
    assert "nobody calls the patch's: " in text
    assert "MegatronFSDP._register_fsdp_hooks" in text


def test_other_parameters_of_an_overridden_function_would_break(other, run):
    change(other, ADAPTER, ("def _get_dp_tp_mesh(dp_cp_group", "def _get_dp_tp_mesh(layout, dp_cp_group"))
    status, text = run()
    assert status == 1
    assert "other parameters (dp_cp_group, tp_group, ep_size=1 -> layout, dp_cp_group, tp_group, ep_size=1): " in text


def test_other_parameters_that_the_patch_passes_on_are_to_be_read_again(other, run):
    change(other, FSDP, ("def forward(self, *inputs, **kwargs)", "def forward(self, *inputs, step, **kwargs)"))
    status, text = run()
    assert status == 0
    assert "MegatronFSDP.forward" in text


def test_what_a_later_version_calls_otherwise_does_not_break(tmp_path, capsys):
    assert cli.main([str(later_core(tmp_path))]) == 0
    text = capsys.readouterr().out
    assert "_allreduce_replicated_grads_over_gtp_remat_group" in text
    # Their code is another there: the first gives every strategy units, the second registers hooks on them.
    assert "FullyShardedDataParallel.__init__ (" in text and "MegatronFSDP._register_fsdp_hooks (" in text
    assert text.endswith("0 would break, 3 to be read again\n")


def test_other_code_of_an_overridden_method_is_to_be_read_again(other, run):
    change(
        other, FSDP, ("def forward(self, *inputs, **kwargs):", "def forward(self, *inputs, **kwargs):\n        1 + 1")
    )
    status, text = run()
    assert status == 0
    assert "Changed behind the patch, to be read again:\n  megatron.core" in text
    assert "MegatronFSDP.forward" in text


def test_an_importer_of_a_name_that_the_patch_lacks_would_break(other, run):
    importing = "from megatron.core.transformer.cuda_graphs import is_graph_capturing, graph_of_next_year"
    change(other, LAYER, ("import torch\n", f"import torch\n{importing}\n"))
    status, text = run()
    assert status == 1
    assert "not in the patch: megatron.core.transformer.cuda_graphs.graph_of_next_year" in text
    assert "cuda_graphs.is_graph_capturing" not in text


def test_a_new_definition_of_the_replaced_module_is_to_be_read(other, run):
    change(
        other,
        "megatron/core/transformer/cuda_graphs.py",
        ("def is_graph_capturing", "def is_new(): ...\ndef is_graph_capturing"),
    )
    status, text = run()
    assert status == 0
    assert "new: megatron.core.transformer.cuda_graphs.is_new" in text


def test_a_folder_without_megatron_core_is_named(tmp_path, capsys):
    assert cli.main([str(tmp_path)]) == 2
    assert f"{tmp_path} has no megatron/core" in capsys.readouterr().err
