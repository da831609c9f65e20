"""Write Megatron datasets of random tokens."""

import random
from pathlib import Path

import numpy

TOKENS = 255  # --vocab-size of the NullTokenizer


def write_documents(prefix: Path) -> Path:
    """Write 100 deterministic documents of 1 to 400 tokens to ``prefix``.bin and ``prefix``.idx; return ``prefix``."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    drawn = random.Random(5)
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=numpy.uint16)
    for _ in range(100):
        document = [drawn.randrange(TOKENS) for _ in range(drawn.randint(1, 400))]
        builder.add_document(numpy.array(document, dtype=numpy.uint16), [len(document)])
    builder.finalize(get_idx_path(str(prefix)))
    return prefix
