"""Write Megatron datasets of random tokens."""

import random
from pathlib import Path

import numpy

TOKENS = 255  # --vocab-size of the NullTokenizer


def write_documents(prefix: Path, count: int, longest: int) -> Path:
    """Write a deterministic dataset to ``prefix`` (a ``.bin`` and an ``.idx`` file) and return ``prefix``.

    Args:
        prefix: Path of the files, without a suffix.
        count: Number of documents.
        longest: Maximum number of tokens per document; the minimum is 1.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    drawn = random.Random(5)
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=numpy.uint16)
    for _ in range(count):
        document = [drawn.randrange(TOKENS) for _ in range(drawn.randint(1, longest))]
        builder.add_document(numpy.array(document, dtype=numpy.uint16), [len(document)])
    builder.finalize(get_idx_path(str(prefix)))
    return prefix
