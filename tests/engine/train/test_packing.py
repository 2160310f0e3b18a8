"""Rows of tokens: none lost, none learnt across documents, the same rows after a return."""

import itertools
import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from made_up_worlds import made_up_world
from torchmuster.errors import Impossible, MusterError
from torchmuster.train.data.formats import Tokens
from torchmuster.train.data.loader import BatchLoader
from torchmuster.train.data.stream import StreamLoader
from torchmuster.train.data.streams.iterable import Indexed, Iterables
from torchmuster.train.data.streams.packing import PackedRows, PaddedRows, Row
from torchmuster.train.data.streams.reading import Source
from torchmuster.train.data.streams.tokenizing import (
    ByteTokenizer,
    Tokenized,
    TransformersTokenizer,
)
from torchmuster.train.data.text import TokenRows, write_tokens
from torchmuster.train.losses import language_model

pytestmark = pytest.mark.engine
END = 99
Documents = list[list[int]]
documents_of_any_length = st.lists(st.lists(st.integers(0, 98), max_size=25), max_size=40)


def rows_of(source: Source, cursor: Any = None) -> list[Row]:
    lane = source.open([0], epoch=0, cursors={0: cursor})[0]
    rows: list[Row] = []
    while more := lane.read(3):
        rows += more
    return rows


@settings(max_examples=80, deadline=None)
@given(documents=documents_of_any_length, length=st.integers(2, 12), packed=st.booleans())
def test_tokens_in_are_tokens_out(documents: Documents, length: int, packed: bool) -> None:
    kind = PackedRows if packed else PaddedRows
    source = kind(Iterables(documents, lanes=1), sequence_length=length, end=END)
    rows = rows_of(source)
    stream = [token for document in documents for token in [*document, END]]
    written = []
    for row in rows:
        assert all(len(one) == length for one in row.values())
        filled = length
        if packed:
            assert "attention_mask" not in row
        else:
            filled = int(row["attention_mask"].sum())
            assert row["attention_mask"].tolist() == [1] * filled + [0] * (length - filled)
        written += row["input_ids"][:filled].tolist()
        assert (row["labels"][filled:] == -100).all()
        learnt = row["labels"] != -100
        assert torch.equal(row["labels"][learnt], row["input_ids"][learnt])
    if packed:
        assert written[len(stream) :] == [END] * (len(rows) * length - len(stream))
        assert len(rows) * length - len(stream) < length
    assert written[: len(stream)] == stream
    _nothing_is_learnt_across_documents(documents, rows, packed)


def _nothing_is_learnt_across_documents(
    documents: Documents, rows: list[Row], packed: bool
) -> None:
    """A token is learnt where it is in one row with the token before it of its own document."""
    expected = []
    length = len(rows[0]["input_ids"]) if rows else 1
    at = 0
    for document in documents:
        for place in range(len(document) + 1):
            row_place = at % length if packed else place % length
            expected.append(place > 0 and row_place > 0)
            at += 1
    if packed:
        labels = [one for row in rows for one in row["labels"].tolist()]
    else:
        labels = [one for row in rows for one in row["labels"][row["attention_mask"] > 0].tolist()]
    assert [label != -100 for label in labels[: len(expected)]] == expected


@settings(max_examples=30, deadline=None)
@given(documents=documents_of_any_length, length=st.integers(2, 12), packed=st.booleans())
def test_rows_go_on_after_any_row(documents: Documents, length: int, packed: bool) -> None:
    kind = PackedRows if packed else PaddedRows
    source = kind(Iterables(documents, lanes=1), sequence_length=length, end=END)
    lane = source.open([0], epoch=0, cursors={})[0]
    rows, cursors = [], [lane.cursor()]
    while row := lane.read(1):
        rows += row
        cursors.append(json.loads(json.dumps(lane.cursor())))
    for stop, cursor in enumerate(cursors):
        rest = rows_of(source, cursor)
        assert len(rest) == len(rows) - stop
        for one, other in zip(rest, rows[stop:], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)


def test_steps_of_packed_rows_go_on_after_any_step() -> None:
    texts = [f"text {one} " * (one % 5) for one in range(60)]

    def loader() -> StreamLoader:
        source = Tokenized(Indexed(texts, lanes=3), ByteTokenizer())
        rows = PackedRows(source, sequence_length=32, end=ByteTokenizer.end)
        return StreamLoader(rows, made_up_world(), global_batch_size=4, block=3)

    def ids(steps: Any) -> list[Any]:
        return [micro.batch["input_ids"].tolist() for step in steps for micro in step]

    whole = ids(loader().epoch(0))
    tokens = sorted(one for batch in whole for row in batch for one in row if one < 256)
    assert tokens == sorted(b"".join(text.encode() for text in texts))
    for stop in range(len(whole)):
        first, second = loader(), loader()
        list(itertools.islice(first.epoch(0), stop))
        second.restore(json.loads(json.dumps(first.state())))
        assert ids(second.epoch(0)) == whole[stop:]


@pytest.mark.usefixtures("quiet_transformers")
def test_a_packed_row_gives_the_loss_of_its_documents_alone() -> None:
    """What transformers' models make of the positions: no document sees another."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        attn_implementation="sdpa",
        use_cache=False,  # with a cache, transformers takes no notice of positions that begin again
    )
    model = transformers.LlamaForCausalLM(config).eval()
    documents = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13], [14]]
    losses = []
    for kind, length in ((PackedRows, 8), (PaddedRows, 8)):
        # 5 + 3 and 6 + 2 tokens with their ends: no document is cut by a row
        rows = rows_of(kind(Iterables(documents, lanes=1), sequence_length=length, end=END))
        batch = torch.utils.data.default_collate(rows)
        total, count = language_model(model, batch)
        losses.append((float(total.detach()), int(count)))
        assert len(rows) == (2 if kind is PackedRows else 4)
    assert losses[0][1] == losses[1][1] == 12
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)


def test_a_file_of_tokens_gives_the_rows_of_packing(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for ids, dtype in ((99, torch.uint16), (70_000, torch.int32)):
        documents = [
            torch.randint(0, ids, (size,), generator=generator).tolist()
            for size in (7, 0, 3, 16, 40, 1)
        ]
        tokens = write_tokens(tmp_path / "a.safetensors", documents, end=ids)
        assert tokens == sum(map(len, documents)) + len(documents)
        rows = TokenRows(f"{tmp_path}/*.safetensors", sequence_length=8)
        stored = rows._tokens(0)[:]
        assert stored.dtype == dtype
        packed = rows_of(PackedRows(Iterables(documents, lanes=1), sequence_length=8, end=ids))
        assert len(rows) == len(packed) == -(-tokens // 8)
        for index, row in enumerate(packed):
            assert all(torch.equal(rows[index][name], row[name]) for name in row)
        with pytest.raises(IndexError):
            rows[len(rows)]
    loader = BatchLoader(rows, made_up_world(), global_batch_size=3, workers=1)
    read = [micro.batch["input_ids"] for step in loader.epoch(0) for micro in step]
    loader.close()
    assert sum(map(len, read)) == len(rows)


def test_files_that_hold_no_tokens_are_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(Impossible) as nothing:
        TokenRows(f"{tmp_path}/*.safetensors", sequence_length=8)
    assert nothing.value == snapshot
    (tmp_path / "a.safetensors").write_bytes(b"something else")
    with pytest.raises(Impossible) as refused:
        TokenRows(f"{tmp_path}/*.safetensors", sequence_length=8)
    assert "write_tokens()" in refused.value.fix
    assert refused.value.what == snapshot


def test_bytes_as_tokens() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(["aß", ""]) == [[97, 195, 159], []]
    assert tokenizer.decode([97, 195, 159, tokenizer.end]) == "aß"
    assert tokenizer.vocabulary == 257


@pytest.mark.usefixtures("quiet_transformers")
def test_a_tokenizer_of_transformers_from_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<end>": 0, "<unknown>": 1, "two": 2, "words": 3}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unknown>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    settings_of_it = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_of_it))
    tokenizer = TransformersTokenizer(str(tmp_path))
    assert (tokenizer.end, tokenizer.vocabulary) == (0, 4)
    samples = ["two words", {"text": "words words"}, {"input_ids": [3, 2]}]
    source = Tokenized(Iterables(samples, lanes=1), tokenizer)
    assert source.open([0], epoch=0, cursors={})[0].read(9) == [
        [2, 3],
        [3, 3],
        Tokens(array("q", [3, 2])),
    ]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    with pytest.raises(Impossible, match="has no end token"):
        TransformersTokenizer(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(Impossible, match=r"cannot load the tokenizer .*empty"):
        TransformersTokenizer(str(tmp_path / "empty"))


def test_transformers_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(Impossible) as refused:
        TransformersTokenizer("gpt2")
    assert "pip install 'torchmuster[transformers]'" in refused.value.fix
    assert refused.value == snapshot


@pytest.mark.parametrize(
    ("sample", "fact"),
    [({"body": "a", "n": 1}, "body, n"), ({"text": 7}, "int"), (5, "int")],
    ids=["other fields", "a number in the field", "no fields"],
)
def test_a_sample_without_text_is_named(
    sample: Any, fact: str, snapshot: SnapshotAssertion
) -> None:
    source = Tokenized(Iterables([sample], lanes=1), ByteTokenizer())
    with pytest.raises(MusterError) as refused:
        source.open([0], epoch=0, cursors={})[0].read(1)
    assert fact in str(refused.value)
    assert refused.value == snapshot
