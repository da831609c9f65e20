"""CUDA graphs under Megatron-FSDP: what installs, inspects and tests the patch to Megatron-Core."""

__version__ = "0.2.0"
