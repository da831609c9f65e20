"""Test prepare_text.py: conversion of text files to an indexed dataset."""

import pytest

pytest.importorskip("megatron.core")

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers import MegatronTokenizer


@pytest.fixture
def prepare_text(examples):
    import prepare_text

    return prepare_text


@pytest.fixture
def files(tmp_path):
    texts = {"a.txt": b"every byte: " + bytes(range(256)), "b.txt": b"", "c.txt": "naïve\r\n".encode()}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    return [tmp_path / name for name in texts]


def read(prefix) -> list[list[int]]:
    """Return the tokens of each document, copied because the dataset owns the mapped file."""
    dataset = IndexedDataset(str(prefix))
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_documents_keep_every_byte_and_end_with_eod(prepare_text, files, tmp_path):
    prepare_text.build(files, str(tmp_path / "data" / "set"))
    documents = read(tmp_path / "data" / "set")
    assert [bytes(document[:-1]) for document in documents] == [files[0].read_bytes(), files[2].read_bytes()]
    tokenizer = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "null-text"}, vocab_size=prepare_text.VOCAB_SIZE
    )
    assert [document[-1] for document in documents] == [tokenizer.eod] * 2


def test_size_limit_truncates_the_last_document(prepare_text, files, tmp_path):
    limit = len(files[0].read_bytes()) + 3
    assert prepare_text.build(files, str(tmp_path / "set"), max_bytes=limit) == (2, limit + 2)
    assert bytes(read(tmp_path / "set")[1][:-1]) == files[2].read_bytes()[:3]


def test_files_without_text_raise_and_leave_no_index(prepare_text, files, tmp_path):
    with pytest.raises(ValueError, match="all files are empty"):
        prepare_text.build([files[1]], str(tmp_path / "set"))
    assert not (tmp_path / "set.idx").exists()
