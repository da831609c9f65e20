"""Checkpoints that runs with and without graphs load alike, with layers by their numbers in the whole model."""

import argparse
import logging
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.core import parallel_state
from megatron.core.distributed.fsdp.global_names import (
    by_global_name,
    global_name,
    inner_name,
    layers_of,
    unused_output_weights,
)
from megatron.core.optimizer.distrib_optimizer import GROUPS, LOSS_SCALE
from megatron.core.tensor_parallel import convert_cuda_rng_state
from megatron.core.utils import log_single_rank
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)
logger = logging.getLogger(__name__)

_CHUNKS = "_chunks"  # in a state dict: the chunks of a pipeline stage
_BY_NAME = ("state", GROUPS)  # in a state dict of the optimizer: what parameters' names are keys of
_VOCABULARY_SIZE = re.compile(
    r"Size mismatch between saved torch\.Size\(\[(\d+).*"
    r" current: torch\.Size\(\[(\d+).* for \S+\.(?:word_embeddings|output_layer)\."
)
_MISSING_STATE = re.compile(r"Missing key in checkpoint state_dict: (optimizer\.state\.\S+)\.\s")


def get_rng_state(ckpt_format: str, tp_group: Any, pp_group: Any, **others: Any) -> Any:
    """Return the states of this rank's random number generators, by tensor and pipeline rank; see megatron-core.

    Loading a model of Megatron-FSDP, megatron-core gives no groups, and would ask for those of the first ranks.
    """
    tp_group = tp_group or parallel_state.get_tensor_model_parallel_group()
    pp_group = pp_group or parallel_state.get_pipeline_model_parallel_group()
    return _upstream.get_rng_state(ckpt_format, tp_group, pp_group, **others)


class _Stage:
    """The chunks of a pipeline stage as one model, whose layers have the numbers of the whole model."""

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
    """Return what a checkpoint holds; see megatron-core."""
    state_dict: dict[str, Any] = _upstream.generate_state_dict(args, model, *more, **others)
    if args.ckpt_format == "fsdp_dtensor" and args.pipeline_model_parallel_size > 1:
        state_dict[_CHUNKS] = model
    return state_dict


def preprocess_fsdp_dtensor_state_dict(args: Any, raw_state_dict: dict[str, Any], model: Any) -> dict[str, Any]:
    """Return ``raw_state_dict`` as it is saved and loaded; see megatron-core.

    Of a pipeline stage it has the parameters of all chunks that passes read, by their names in the whole model.
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
                key: used(optimizer[key]) for key in _BY_NAME if key in optimizer
            }
    if chunks is not None or not (args.bf16 or args.fp16):  # without a wrapper for precision megatron-core finds none
        model = _Stage(chunks or [model])
    return _upstream.preprocess_fsdp_dtensor_state_dict(args, raw_state_dict, model)


def _model_keys(chunks: list[Any]) -> list[str]:
    """The keys of the chunks' parameters in megatron-core's state dict."""
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


def _load_base_checkpoint(
    load_dir: str | None, args: Any, rank0: bool = False, sharded_state_dict: Any = None, **others: Any
) -> Any:
    """Load a checkpoint into ``sharded_state_dict``; see megatron-core.

    Raises:
        ValueError: the checkpoint lacks layers of the model or the optimizer's states, its vocabulary is padded to
            another size, or its random number generators are of another device.
    """
    asked = sharded_state_dict or {}
    _expect_tensors(asked)
    chunks = asked.get(_CHUNKS) or asked.get("_model")
    if chunks and asked.get("optimizer") and load_dir is not None:
        at = argparse.Namespace(load=load_dir, ckpt_step=getattr(args, "ckpt_step", None))
        asked["optimizer"] = _as_saved(asked["optimizer"], _upstream.get_load_checkpoint_path_by_args(at))
    try:
        loaded, name, *rest = _upstream._load_base_checkpoint(load_dir, args, rank0, sharded_state_dict, **others)
    except CheckpointException as error:
        if "rng_state" in str(error):
            raise ValueError(
                f"--load {load_dir}: the states of its random number generators do not fit those of this run, as "
                "between a GPU and the CPU backend, or where it was saved with fewer tensor or pipeline ranks. Add "
                "--no-load-rng; dropout then differs from the run that saved them."
            ) from error
        if missing := _MISSING_STATE.search(f"{error} "):
            raise ValueError(
                f"--load {load_dir}: it lacks {missing[1]}. If it is of another model, set the flags that saved it. "
                "If --no-save-optim saved it, add --no-load-optim, or --finetune to count iterations from 0 too."
            ) from error
        sizes = _VOCABULARY_SIZE.search(str(error))
        if sizes and sizes[1] != sizes[2]:
            raise ValueError(
                f"--load {load_dir}: its vocabulary is padded to {sizes[1]} tokens, and this run's to {sizes[2]}, a "
                "multiple of --make-vocab-size-divisible-by times --tensor-model-parallel-size. If the tokenizer is "
                f"the same, add --padded-vocab-size {sizes[1]}."
            ) from error
        raise
    if loaded is not None and chunks:
        given = {key: asked[key] for key in _model_keys(chunks)}
        if not args.finetune and others.get("gpt_compat_layer_maps") is None:
            _refuse_missing_layers(name, by_global_name(chunks, given.values()))
        if len(chunks) > 1:  # megatron-core returns the parameters of one; what was read is in the tensors
            loaded |= given
    return loaded, name, *rest


def _as_saved(optimizer: dict[str, Any], checkpoint: str) -> dict[str, Any]:
    """Return ``optimizer``, a state dict to load into, with the keys and types that ``checkpoint`` has.

    A checkpoint saved before the first step has no states. megatron-core saves no loss scale, and the learning rates of
    a captured optimizer as tensors.
    """
    try:
        saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    except FileNotFoundError:  # training starts without a checkpoint
        return optimizer
    return _part_as_saved(optimizer, saved, "optimizer.", checkpoint)


def _part_as_saved(optimizer: dict[str, Any], saved: dict[str, Any], prefix: str, checkpoint: str) -> dict[str, Any]:
    saved = {key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)}
    if not saved:  # --no-save-optim
        return optimizer
    if GROUPS not in optimizer:  # of a ChainedOptimizer of several, by number
        return {
            name: _part_as_saved(part, saved, f"{name}.", checkpoint) if isinstance(part, dict) else part
            for name, part in optimizer.items()
        }
    groups = optimizer[GROUPS]
    if not any(key.startswith("state.") for key in saved):
        message = f"--load: {checkpoint} has no optimizer states, which start empty"
        log_single_rank(logger, logging.WARNING, message)
        optimizer = optimizer | {"state": {}}
        # TransformerEngine's Adam counts its steps in the groups.
        groups = {name: {key: group[key] for key in group if key != "step"} for name, group in groups.items()}
    if LOSS_SCALE in optimizer and not any(key.startswith(f"{LOSS_SCALE}.") for key in saved):
        message = f"--load: {checkpoint} has no loss scale, which starts at --initial-loss-scale"
        log_single_rank(logger, logging.WARNING, message)
        optimizer = {key: value for key, value in optimizer.items() if key != LOSS_SCALE}
    if any(key.endswith(".lr") and isinstance(value, TensorStorageMetadata) for key, value in saved.items()):
        groups = {name: group | {"lr": torch.tensor(group["lr"])} for name, group in groups.items()}
    return optimizer | {GROUPS: groups}


def _refuse_missing_layers(checkpoint: str, model: dict[str, Any]) -> None:
    """Compare the layers of ``model``'s names with those of a checkpoint, as megatron-core lets some be missing."""
    known = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    saved = layers_of(key.removeprefix("model.") for key in known if key.startswith("model."))
    for place, numbers in layers_of(model).items():
        missing = sorted(numbers - saved.get(place, numbers))
        if missing:
            raise ValueError(
                f"--load: {checkpoint} lacks layers {missing} of {place}, counted from 0. It is of a model with fewer, "
                "or of pipeline stages that were saved by an earlier version of this patch, each over the other: load "
                "another one, or add --finetune to train these layers from the start"
            )


def _expect_tensors(state_dict: dict[str, Any]) -> None:
    """Put tensors in the place of generators, whose states a tracker for graphs has and saves.

    What is read into a tensor may be either in a checkpoint; the tracker gets its own kind afterwards.
    """
    saved = state_dict.get("rng_state")
    by_rank = saved.values() if isinstance(saved, dict) else [saved]  # fsdp_dtensor, torch_dcp
    for states in (state for ranks in by_rank if isinstance(ranks, list) for state in ranks):
        tracked = states["rng_tracker_states"].items()
        states["rng_tracker_states"] = {name: convert_cuda_rng_state(state) for name, state in tracked}
