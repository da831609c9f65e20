"""Define sizes and environment variables for comparisons on GPUs."""

from typing import Any

import torch

SIZES: dict[str, Any] = {"transformer_engine": True, "hidden": 512, "sequence": 1024, "micro_batch": 1}
# Without this, cuDNN's attention backward is not deterministic.
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
# Counted at import, before tests of this process install the CPU backend
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
