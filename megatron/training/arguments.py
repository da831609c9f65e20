"""x"""
from megatron_fsdp_cuda_graphs.overlay import extend
_upstream = extend(__name__)
