"""Save and load Megatron-FSDP checkpoints that are independent of graphs and use global layer numbers."""

import argparse
import logging
from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from megatron.core import parallel_state
from megatron.core.distributed.fsdp.global_names import (
    by_global_name,
    global_name,
    inner_name,
    unused_output_weights,
)
from megatron.core.optimizer.distrib_optimizer import LOSS_SCALE
from megatron.core.tensor_parallel import convert_cuda_rng_state
from megatron.core.utils import log_single_rank
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)
logger = logging.getLogger(__name__)

_CHUNKS = "_chunks"  # the key of a pipeline stage's chunks in a state dict
_GROUPS = "param_to_group_meta"  # key in checkpoints: the options of each parameter's group


def get_rng_state(ckpt_format: str, tp_group: Any, pp_group: Any, **others: Any) -> Any:
    """Return this rank's random number generator states by tensor and pipeline rank; see megatron-core.

    When megatron-core loads a Megatron-FSDP model, it passes no groups, so all ranks would read the states of tensor
    and pipeline rank 0.
    """
    tp_group = tp_group or parallel_state.get_tensor_model_parallel_group()
    pp_group = pp_group or parallel_state.get_pipeline_model_parallel_group()
    return _upstream.get_rng_state(ckpt_format, tp_group, pp_group, **others)


class _Stage:
    """Presents the chunks of a pipeline stage as one model with global layer numbers."""

    def __init__(self, chunks: list[Any]) -> None:
        self.config = chunks[0].config
        self._chunks = chunks
        params = by_global_name(chunks, [dict(chunk.named_parameters()) for chunk in chunks])
        self._params = {inner_name(name): param for name, param in params.items()}

    def get_parameter(self, name: str) -> Any:
        return self._params[inner_name(name)]

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        for chunk in self._chunks:
            rename = global_name(chunk)
            yield from ((rename(name), module) for name, module in chunk.named_modules())


def generate_state_dict(args: Any, model: list[Any], *more: Any, **others: Any) -> dict[str, Any]:
    """Return the contents of a checkpoint; see megatron-core."""
    state_dict: dict[str, Any] = _upstream.generate_state_dict(args, model, *more, **others)
    if args.ckpt_format == "fsdp_dtensor" and args.pipeline_model_parallel_size > 1:
        state_dict[_CHUNKS] = model
    return state_dict


def preprocess_fsdp_dtensor_state_dict(args: Any, raw_state_dict: dict[str, Any], model: Any) -> dict[str, Any]:
    """Convert ``raw_state_dict`` to the form that is saved and loaded; see megatron-core.

    For a pipeline stage, the result contains the parameters that its chunks use, by their global names.
    """
    chunks = raw_state_dict.get(_CHUNKS)
    if chunks is not None:
        keys, unused = _model_keys(chunks), unused_output_weights(chunks)

        def used(named: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in named.items() if inner_name(name) not in unused}

        model_state = used(by_global_name(chunks, [raw_state_dict[key] for key in keys]))
        raw_state_dict = {key: value for key, value in raw_state_dict.items() if key not in (_CHUNKS, *keys)}
        raw_state_dict["model"] = model_state
        if "optimizer" in raw_state_dict:
            optimizer = raw_state_dict["optimizer"]
            raw_state_dict["optimizer"] = optimizer | {
                key: used(optimizer[key]) for key in ("state", _GROUPS) if key in optimizer
            }
    if chunks is not None or not (args.bf16 or args.fp16):  # megatron-core expects a precision wrapper
        model = _Stage(chunks or [model])
    return _upstream.preprocess_fsdp_dtensor_state_dict(args, raw_state_dict, model)


def _model_keys(chunks: list[Any]) -> list[str]:
    """Return the keys under which megatron-core's state dict stores each chunk's parameters."""
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


def _load_base_checkpoint(
    load_dir: str | None, args: Any, rank0: bool = False, sharded_state_dict: Any = None, **others: Any
) -> Any:
    """Load a checkpoint into ``sharded_state_dict``; see megatron-core.

    Raises:
        ValueError: A tensor is missing from the checkpoint or has a different size.
    """
    requested = sharded_state_dict or {}
    _expect_tensors(requested)
    chunks = requested.get(_CHUNKS) or requested.get("_model")
    if chunks and requested.get("optimizer") and load_dir is not None:
        at = argparse.Namespace(load=load_dir, ckpt_step=getattr(args, "ckpt_step", None))
        requested["optimizer"] = _as_saved(requested["optimizer"], _upstream.get_load_checkpoint_path_by_args(at))
    try:
        loaded, *rest = _upstream._load_base_checkpoint(load_dir, args, rank0, sharded_state_dict, **others)
    except CheckpointException as error:
        raise ValueError(
            f"--load {load_dir} does not fit this run: {error}\nUse the flags of the run that saved it. Add "
            "--no-load-rng if the RNG states belong to other devices or ranks, --no-load-optim if no optimizer was "
            "saved, and --padded-vocab-size if the vocabulary was padded to a different size."
        ) from error
    if loaded is not None and chunks and len(chunks) > 1:  # megatron-core returns the parameters of only one chunk
        loaded |= {key: requested[key] for key in _model_keys(chunks)}
    return loaded, *rest


def _as_saved(optimizer: dict[str, Any], checkpoint: str) -> dict[str, Any]:
    """Return the state dict ``optimizer`` without the optimizer states and the loss scale that ``checkpoint`` lacks.

    A checkpoint saved before the first step has no states, and megatron-core saves no loss scale.
    """
    if _GROUPS not in optimizer:  # several optimizers
        return optimizer
    try:
        keys = [*FileSystemReader(checkpoint).read_metadata().state_dict_metadata]
    except FileNotFoundError:  # training starts without a checkpoint
        return optimizer
    if not any(key.startswith("optimizer.") for key in keys):  # --no-save-optim
        return optimizer
    if not any(key.startswith("optimizer.state.") for key in keys):
        _warn(f"--load: {checkpoint} has no optimizer states, so they start empty")
        # TransformerEngine's Adam counts its steps in the groups.
        groups = {name: {k: v for k, v in group.items() if k != "step"} for name, group in optimizer[_GROUPS].items()}
        optimizer = optimizer | {"state": {}, _GROUPS: groups}
    if LOSS_SCALE in optimizer and not any(key.startswith(f"optimizer.{LOSS_SCALE}.") for key in keys):
        _warn(f"--load: {checkpoint} has no loss scale, so it starts at --initial-loss-scale")
        optimizer = {key: value for key, value in optimizer.items() if key != LOSS_SCALE}
    return optimizer


def _warn(message: str) -> None:
    log_single_rank(logger, logging.WARNING, message)


def _expect_tensors(state_dict: dict[str, Any]) -> None:
    """Replace the generators of a graph-safe RNG tracker in ``state_dict`` by tensors with their states.

    A checkpoint contains generators or tensors. Both are loaded as tensors, and the tracker converts them as needed.
    """
    saved = state_dict.get("rng_state")
    by_rank = saved.values() if isinstance(saved, dict) else [saved]  # fsdp_dtensor, torch_dcp
    for states in (state for ranks in by_rank if isinstance(ranks, list) for state in ranks):
        tracked = states["rng_tracker_states"].items()
        states["rng_tracker_states"] = {name: convert_cuda_rng_state(state) for name, state in tracked}
