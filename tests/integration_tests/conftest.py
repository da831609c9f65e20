"""Fixtures of the integration tests."""

from tests.support.launch import compare_runs

__all__ = ["compare_runs"]
