"""Build a Megatron indexed dataset (PREFIX.bin, PREFIX.idx) from text files, one token per byte.

Each file is a document: its bytes (IDs 0 to 255), then END_OF_DOCUMENT (256). Train on it with

    --data-path PREFIX --tokenizer-type NullTokenizer --vocab-size 257

NullTokenizer uses the last ID below ``--vocab-size`` as the end of a document. Without files, the dataset contains the
sources of Python's standard library.

    python examples/prepare_text.py --output-prefix data/stdlib
    python examples/prepare_text.py --output-prefix data/books --max-megabytes 50 books/*.txt
"""

import argparse
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy
import torch

END_OF_DOCUMENT = 256
VOCAB_SIZE = END_OF_DOCUMENT + 1
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib_sources() -> list[Path]:
    """Return the source files of Python's standard library without its tests, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    return [root / file for file in sorted(files) if not LEFT_OUT.intersection(file.parts)]


def encode(text: bytes) -> torch.Tensor:
    """Return a document's tokens, int32 [bytes + 1], ending with END_OF_DOCUMENT."""
    tokens = numpy.empty(len(text) + 1, dtype=numpy.int32)
    tokens[:-1] = numpy.frombuffer(text, dtype=numpy.uint8)
    tokens[-1] = END_OF_DOCUMENT
    return torch.from_numpy(tokens)


def documents(files: Iterable[Path], max_bytes: int | None) -> Iterator[bytes]:
    """Yield the contents of nonempty files in order, at most ``max_bytes`` in total."""
    left = max_bytes
    for file in files:
        text = file.read_bytes()[:left]
        if text:
            yield text
        if left is not None:
            left -= len(text)
            if left == 0:
                return


def build(
    files: list[Path], prefix: str, max_bytes: int | None = None, progress=lambda message: None
) -> tuple[int, int]:
    """Write ``prefix.bin`` and ``prefix.idx``; return the numbers of documents and tokens.

    The index is written last, so a dataset with an index is complete.

    Args:
        files: Text files, one document each.
        prefix: Path of the dataset without extension. Its folder is created.
        max_bytes: Maximum bytes of text; None for no limit.
        progress: Called with a message every 100 documents.

    Raises:
        ValueError: All files are empty.
        OSError: A file cannot be read or written.
    """
    # Imported here because it takes seconds, which --help and importers of VOCAB_SIZE should not spend.
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    Path(get_idx_path(prefix)).unlink(missing_ok=True)
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=numpy.uint16)
    count = tokens = 0
    for text in documents(files, max_bytes):
        document = encode(text)
        builder.add_document(document, [len(document)])
        count += 1
        tokens += len(document)
        if count % 100 == 0:
            progress(f"{count} documents, {tokens / 1e6:.2f} million tokens")
    if count == 0:
        raise ValueError("all files are empty: pass at least one file with text")
    builder.finalize(get_idx_path(prefix))
    return count, tokens


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line.

    Raises:
        SystemExit: A file is missing or --max-megabytes is not positive.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("files", nargs="*", type=Path, help="text files (default: Python's standard library)")
    parser.add_argument("--output-prefix", required=True, help="path without suffix of the .bin and .idx files")
    parser.add_argument("--max-megabytes", type=float, help="maximum megabytes of text (default: no limit)")
    options = parser.parse_args(arguments)
    for file in options.files:
        if not file.is_file():
            parser.error(f"argument files: {file} is not a file; pass paths of text files")
    if options.max_megabytes is not None and options.max_megabytes < 1e-6:
        parser.error(f"argument --max-megabytes: {options.max_megabytes} is less than a byte; pass a positive number")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Build the dataset and print the flags to train on it."""
    options = parse(arguments)
    max_bytes = None if options.max_megabytes is None else round(options.max_megabytes * 1e6)
    files = options.files or stdlib_sources()
    try:
        count, tokens = build(files, options.output_prefix, max_bytes, lambda message: print(message, flush=True))
    except (OSError, ValueError) as error:
        sys.exit(f"prepare_text.py: {error}")
    print(f"{options.output_prefix}.bin, .idx: {count} documents, {tokens} tokens")
    print(f"flags: --data-path {options.output_prefix} --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE}")


if __name__ == "__main__":
    main()
