"""Provide tools for maintainers of the patch, run from a checkout."""
