"""Set up this process as the first of one or two pipeline stages."""

import pytest

from .stages import first_of_stages

MICROBATCHES = 3


@pytest.fixture
def one_stage(cpu_backend):
    with first_of_stages(1, MICROBATCHES):
        yield


@pytest.fixture
def two_stages(cpu_backend):
    with first_of_stages(2, MICROBATCHES):
        yield
