"""Create a folder of links to the installed megatron-core, with edited files."""

import os
import shutil
from pathlib import Path

from megatron_fsdp_cuda_graphs.overlay import find_core

ADAPTER = "megatron/core/distributed/fsdp/mcore_fsdp_adapter.py"
FSDP = "megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py"
_BASE = "FullyShardedDataParallel"
_VERSIONS = f"""class {_BASE}(_BaseDataParallel):
    def __new__(cls, config, ddp_config, *args, **kwargs):
        second = getattr(ddp_config, "megatron_fsdp_version", 1) == 2
        return object.__new__(FullyShardedDataParallelV2 if second else FullyShardedDataParallelV1)


class FullyShardedDataParallelV2({_BASE}):
    pass


"""
_SHARDS_PARAMETERS = 'self.ddp_config.data_parallel_sharding_strategy == "optim_grads_params":\n'
_SHARDS = 'self.ddp_config.data_parallel_sharding_strategy != "no_shard":\n'


def installed() -> Path:
    """Return the folder of the installed ``megatron/core``."""
    core = find_core()
    assert core is not None
    return Path(core.origin).parents[2]


def linked_core(folder: Path) -> Path:
    """Create the links under ``folder``, and return ``folder``."""
    for package in ("core", "training"):
        shutil.copytree(
            installed() / "megatron" / package,
            folder / "megatron" / package,
            copy_function=os.symlink,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    return folder


def change(folder: Path, name: str, *edits: tuple[str, str]) -> None:
    """Replace a link with an edited copy; ``edits``: pairs of old and new text. The old text must occur."""
    path = folder / name
    text = path.read_text()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    path.unlink()
    path.write_text(text)


def _with_every_strategy(follows: str) -> tuple[str, str]:
    """Return an edit of the check before the text ``follows``: accept all sharding strategies except ``no_shard``."""
    return _SHARDS_PARAMETERS + follows, _SHARDS + follows


def later_core(folder: Path) -> Path:
    """Create a megatron-core under ``folder`` with the known changes of 0.20, and return the folder.

    ``FullyShardedDataParallel`` constructs ``FullyShardedDataParallelV1`` or ``...V2``, and layers are units with any
    sharding strategy.
    """
    linked_core(folder)
    change(folder, "megatron/core/package_info.py", ("MINOR = 19", "MINOR = 20"))
    change(
        folder,
        ADAPTER,
        (
            "class FullyShardedDataParallel(_BaseDataParallel):",
            f"{_VERSIONS}class FullyShardedDataParallelV1({_BASE}):",
        ),
        _with_every_strategy("                self.fsdp_unit_modules ="),
    )
    change(
        folder,
        FSDP,
        _with_every_strategy("                    self.forward_pre_hooks["),
        ('            assert self.data_parallel_sharding_strategy == "optim_grads_params"\n', ""),
    )
    return folder
