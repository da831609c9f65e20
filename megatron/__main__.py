"""``python -m megatron_fsdp_cuda_graphs``: says whether graphs under Megatron-FSDP can work here."""

import sys

from .doctor import main

sys.exit(main())
