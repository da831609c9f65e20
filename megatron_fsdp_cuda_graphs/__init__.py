"""Install, inspect and test the patch to Megatron-Core for CUDA graphs under Megatron-FSDP."""

__version__ = "0.4.0"
