"""Installs, inspects and tests the patch to Megatron-Core for CUDA graphs under Megatron-FSDP."""

__version__ = "0.3.0"
