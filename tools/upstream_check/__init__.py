"""Checks the patch against another megatron-core, without importing it: what would break, and what to read again.

``sources`` reads modules of a folder, ``reliances`` what the patch takes from megatron-core, ``check`` compares.
"""
