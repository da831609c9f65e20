"""Fixtures of the GPU tests."""

from tests.support.trainings.launch import compare_runs

__all__ = ["compare_runs"]
