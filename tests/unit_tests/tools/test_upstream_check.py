"""Test that upstream_check.py lists changes of megatron-core in definitions that the patch overrides."""

from tests.support.linked_core import change, linked_core
from tools import upstream_check as cli

ADAPTER = "megatron/core/distributed/fsdp/mcore_fsdp_adapter.py"
FSDP = "megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py"
REPLACED = "megatron/core/transformer/cuda_graphs.py"
FORWARD = "def forward(self, *inputs, **kwargs):"
CAPTURING = "def is_graph_capturing"


def checked(folder, capsys):
    status = cli.main([str(folder)])
    return status, capsys.readouterr().out.splitlines()


def test_overridden_definitions_that_differ_are_listed(tmp_path, capsys):
    linked_core(tmp_path)
    assert checked(tmp_path, capsys) == (0, ["0 overridden definitions differ"])
    change(tmp_path, FSDP, (FORWARD, f"{FORWARD}\n        1 + 1"), ("def get_distributed_index", "def not_overridden"))
    change(tmp_path, REPLACED, (CAPTURING, f"def is_new(): ...\ndef _is_private(): ...\n{CAPTURING}"))
    changed = f"changed {FSDP[:-3].replace('/', '.')}.MegatronFSDP.forward"
    new = f"new {REPLACED[:-3].replace('/', '.')}.is_new"
    assert checked(tmp_path, capsys) == (0, [changed, new, "2 overridden definitions differ"])
    change(tmp_path, ADAPTER, ("def _get_dp_tp_mesh", "def get_dp_tp_mesh"))
    removed = f"removed {ADAPTER[:-3].replace('/', '.')}._get_dp_tp_mesh"
    assert checked(tmp_path, capsys) == (1, [removed, changed, new, "3 overridden definitions differ"])


def test_folder_without_megatron_core_fails(tmp_path, capsys):
    assert cli.main([str(tmp_path)]) == 2
    assert f"{tmp_path} has no megatron/core" in capsys.readouterr().err
