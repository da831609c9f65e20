"""The names that megatron-core's ``cuda_graphs`` imports: callers read and patch them there too.

TransformerEngine, tqdm and generalized tensor parallelism (GTP) are optional, as in megatron-core: ``HAVE_TE_GRAPHS``,
``HAVE_TQDM`` and ``HAVE_GTP`` are True if they can be imported.
"""
# ruff: noqa: F401

import dataclasses
import gc
import inspect
import logging
import math
import os
import time
from collections import defaultdict
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import partial
from itertools import chain, zip_longest
from math import ceil
from typing import Any, Dict, List  # noqa: UP035

import torch
from packaging.version import Version as PkgVersion
from torch.utils._pytree import tree_map as tree_map_pyt

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import (
    CudaRNGStatesTracker,
    get_all_rng_states,
    get_cuda_rng_tracker,
    is_checkpointing,
)
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.module import GraphableMegatronModule, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_torch_version,
    is_te_min_version,
    log_on_each_pipeline_stage,
    log_single_rank,
)

try:
    import transformer_engine as te
    from transformer_engine.pytorch.distributed import is_fp8_activation_recompute_enabled
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
    from transformer_engine.pytorch.graph import restore_fp8_tensors, save_fp8_tensors
    from transformer_engine.pytorch.graph import set_capture_end as te_set_capture_end
    from transformer_engine.pytorch.graph import set_capture_start as te_set_capture_start
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
    from transformer_engine.pytorch.utils import make_weak_ref

    HAVE_TE_GRAPHS = True
except Exception:  # a wheel without a CUDA driver fails in many ways
    HAVE_TE_GRAPHS = False

try:
    from megatron.core.tensor_parallel.gtp_api import HAVE_GTP
except ImportError:
    HAVE_GTP = False

if HAVE_GTP:
    from megatron.core.tensor_parallel.gtp_api import (
        GTPChain,
        get_ag_stream,
        get_rs_stream,
        set_cuda_graph_mempool,
        wait_async_comms,
    )
else:
    GTPChain = get_ag_stream = get_rs_stream = set_cuda_graph_mempool = wait_async_comms = None

try:
    from tqdm import tqdm

    HAVE_TQDM = True
except ImportError:
    HAVE_TQDM = False
