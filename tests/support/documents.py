"""Datasets of random tokens, as Megatron's trainings read them."""

import random
from pathlib import Path

import numpy

TOKENS = 255  # as many as NullTokenizer has with --vocab-size 255


def write_documents(prefix: Path, count: int, longest: int) -> Path:
    """Write a dataset to ``prefix`` (a ``.bin`` and an ``.idx`` file), the same at every call, and return ``prefix``.

    Args:
        prefix: The files' path without their endings.
        count: Documents.
        longest: The most tokens of a document; the fewest is 1.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    drawn = random.Random(5)
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=numpy.uint16)
    for _ in range(count):
        document = [drawn.randrange(TOKENS) for _ in range(drawn.randint(1, longest))]
        builder.add_document(numpy.array(document, dtype=numpy.uint16), [len(document)])
    builder.finalize(get_idx_path(str(prefix)))
    return prefix
