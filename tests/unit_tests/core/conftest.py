"""Fixtures of all tests of ``megatron.core``."""

from tests.support.rank_fixtures import cpu_backend_of_module, process_group

__all__ = ["cpu_backend_of_module", "process_group"]
