"""Provide fixtures for tests that train under Megatron-FSDP."""

from tests.support.ranks.rank_fixtures import cpu_backend_of_module, one_rank, ranks, side_stream

__all__ = ["cpu_backend_of_module", "one_rank", "ranks", "side_stream"]
