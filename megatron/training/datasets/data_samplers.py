"""Data loaders of pretraining, whose batches cost the training process less to receive.

Everything else in this module is megatron-core's.
"""

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, default_collate

from megatron_fsdp_cuda_graphs.overlay import extend

from .inline_batch import collate

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
    """Return the data loader of ``dataset``; see megatron-core. Its workers send small tensors within messages."""
    loader = _upstream.build_pretraining_data_loader(dataset, consumed_samples)
    own = isinstance(loader, DataLoader) and loader is not dataset  # not with --dataloader-type external
    if own and loader.num_workers > 0 and loader.collate_fn is default_collate:
        loader.collate_fn = collate
    return loader
