"""Records that hold token ids already: used as they are, with their labels; chat messages are refused."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmuster.errors import MusterError
from torchmuster.train.data.formats import RecordFormat, RecordTokenizer, Tokens
from torchmuster.train.data.rows import Row, lay_out, row_of
from torchmuster.train.data.text import Records, TextFormat, TextRows, TextStream, open_files
from torchmuster.train.data.text import rows_of as prepared_rows
from torchmuster.train.data.tokenizers import ByteTokenizer, Tokenizer, TransformersTokenizer
from torchmuster.train.losses import language_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.integrations,
    pytest.mark.usefixtures("quiet_transformers"),
]

RECORDS = [
    {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
    {"input_ids": [9, 10, 11], "labels": [9, 10, -100]},
    {"input_ids": [12, 13, 14, 15, 16, 17], "labels": [-100, 13, -100, 15, 16, 17]},
    {"input_ids": [18, 19]},
]


def word_tokenizer(folder: Path) -> TransformersTokenizer:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<end>": 0, "<unknown>": 1, "two": 2, "words": 3}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unknown>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(folder / "tokenizer.json"))
    settings_of_it = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_of_it))
    return TransformersTokenizer(str(folder))


@pytest.fixture(params=["bytes", "transformers"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else word_tokenizer(tmp_path)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def laid_out(records: list[Any], tokenizer: Tokenizer, *, length: int, packed: bool) -> list[Row]:
    documents = RecordTokenizer(RecordFormat(), tokenizer).documents(records)
    tokens = [document for document in documents if isinstance(document, Tokens)]
    layouts = lay_out(tokens, length, pack=packed, whole=False)
    return [row_of(layout, length, masked=not packed) for layout in layouts]


@pytest.mark.parametrize("packed", [True, False])
def test_the_loss_and_its_count_are_those_of_the_records(packed: bool) -> None:
    """The sum over the rows is what transformers computes for each record with its labels alone."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    expected, counted = 0.0, 0
    for record in RECORDS:
        ids = torch.tensor([record["input_ids"]])
        labels = torch.tensor([record.get("labels", record["input_ids"])])
        learnt = int((labels[:, 1:] != -100).sum())
        expected += float(model(input_ids=ids, labels=labels).loss.detach()) * learnt
        counted += learnt
    rows = laid_out(RECORDS, ByteTokenizer(), length=15, packed=packed)
    assert len(rows) == (1 if packed else 4)
    total, count = language_model(model, torch.utils.data.default_collate(rows))
    assert int(count) == counted == 8
    assert float(total.detach()) == pytest.approx(expected, rel=1e-5)


documents = st.lists(
    st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=20), max_size=25
)


@settings(max_examples=60, deadline=None)
@given(documents=documents, length=st.integers(2, 12), packed=st.booleans())
def test_no_id_or_label_is_lost(
    documents: list[list[tuple[int, bool]]], length: int, packed: bool
) -> None:
    records = [
        {
            "input_ids": [token for token, _ in document],
            "labels": [token + 1 if learnt else -100 for token, learnt in document],
        }
        for document in documents
    ]
    rows = laid_out(records, ByteTokenizer(), length=length, packed=packed)
    expected = [
        (token, token + 1 if learnt and place else -100)
        for document in documents
        for place, (token, learnt) in enumerate(document)
    ]
    written: list[tuple[int, int]] = []
    for number, row in enumerate(rows):
        filled = length
        if not packed:
            filled = int(row["attention_mask"].sum())
        elif number == len(rows) - 1:
            filled = len(expected) - length * (len(rows) - 1)
        pairs = zip(row["input_ids"].tolist(), row["labels"].tolist(), strict=True)
        written += list(itertools.islice(pairs, filled))
    assert [token for token, _ in written] == [token for token, _ in expected]
    for (_, label), (_, wanted) in zip(written, expected, strict=True):
        assert label in (wanted, -100)  # -100: the first of a row has nothing before it
    assert sum(
        label != wanted for (_, label), (_, wanted) in zip(written, expected, strict=True)
    ) <= (len(rows))


def test_ids_win_over_text_and_a_missing_value_is_none(tokenizer: Tokenizer) -> None:
    """As datasets.map leaves records: the text stays, and a column that a record lacks is None."""
    records = [
        {"text": "two words", "input_ids": [7, 8], "labels": [-100, 8]},
        {"text": None, "input_ids": [7, 9], "labels": None, "attention_mask": None},
        {"text": "two", "input_ids": None, "labels": None},
    ]
    rows = laid_out(records, tokenizer, length=8, packed=False)
    assert rows[0]["input_ids"].tolist()[:2] == [7, 8]
    assert rows[1]["labels"].tolist()[:2] == [-100, 9]
    assert rows[2]["input_ids"].tolist()[0] == tokenizer.encode(["two"])[0][0]


TEXT = TextFormat(tokenizer=ByteTokenizer(), sequence_length=8, pack=False)


def of_files(records: list[Any], folder: Path) -> TextRows:
    lines = "\n".join(json.dumps(record) for record in records)
    (folder / "data.jsonl").write_text(lines)
    return prepared_rows(open_files(f"{folder}/data.jsonl", TEXT.record), TEXT)


def of_dataset(records: list[Any], how: str = "") -> TextRows | TextStream:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(records)
    if how == "iterable":
        dataset = dataset.to_iterable_dataset(num_shards=2)
        return TextStream(Records(dataset=dataset, name="records"), TEXT)
    return prepared_rows(Records(dataset=dataset, name="records"), TEXT)


@pytest.mark.parametrize(
    "opened",
    [of_files, lambda records, folder: of_dataset(records, "iterable")],
    ids=["files", "iterable dataset"],
)
def test_wherever_records_come_from(
    opened: Callable[[list[Any], Path], Any], tmp_path: Path
) -> None:
    records = [{**one, "labels": one.get("labels", one["input_ids"])} for one in RECORDS]
    rows = opened(records, tmp_path)
    if isinstance(rows, TextRows):
        rows = [rows[index] for index in range(len(rows))]
    found = sorted((row["input_ids"].tolist(), row["labels"].tolist()) for row in rows)
    for (ids, labels), record in zip(found, records, strict=True):
        size = len(record["input_ids"])
        assert ids[:size] == record["input_ids"]
        assert labels == [-100, *record["labels"][1:], *[-100] * (8 - size)]


CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


@pytest.mark.parametrize("record", [{"messages": CHAT}, {"input_ids": CHAT}])
def test_chat_messages_are_refused_before_anything_is_built(record: Any, tmp_path: Path) -> None:
    with pytest.raises(MusterError, match="holds chat messages"):
        of_files([record], tmp_path)


@pytest.mark.parametrize(
    "record",
    [
        {"input_ids": [1, 2, 3], "labels": [1, 2]},
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1]},
        {"input_ids": [1.5, 2]},
        {"input_ids": [[1, 2], [3]]},
        {"input_ids": [1, -2]},
        {"input_ids": 7},
        {"input_ids": "two words"},
        {"input_ids": [1, 2], "labels": 1},
        {"input_ids": [1, 2], "labels": [1, -1]},
        {"text": ["two", "words"]},
    ],
    ids=repr,
)
def test_what_is_not_token_ids_is_refused(record: Any, tmp_path: Path) -> None:
    with pytest.raises(MusterError) as refused:
        of_files([record], tmp_path)
    assert f"{tmp_path}/data.jsonl:1: a record's field " in str(refused.value)
