"""Rows of tokens: none lost, none learnt across documents, the same rows after a resume."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from made_up_worlds import made_up_world
from torchmuster.errors import Impossible
from torchmuster.train.data.formats import RecordFormat, RecordTokenizer, Tokens
from torchmuster.train.data.rows import Row, best_fit, lay_out, row_of
from torchmuster.train.data.stream import StreamLoader
from torchmuster.train.data.text import Records, TextFormat, TextStream
from torchmuster.train.data.tokenizers import ByteTokenizer, TransformersTokenizer
from torchmuster.train.losses import language_model

pytestmark = pytest.mark.engine
END = 99
Documents = list[list[int]]
documents_of_any_length = st.lists(
    st.lists(st.integers(0, 98), max_size=25), min_size=1, max_size=40
)


def rows_of(documents: Documents, length: int, *, pack: bool) -> list[Row]:
    tokens = [Tokens([*document, END]) for document in documents]
    layouts = lay_out(tokens, length, pack=pack, whole=False)
    return [row_of(layout, length, masked=not pack) for layout in layouts]


@settings(max_examples=80, deadline=None)
@given(documents=documents_of_any_length, length=st.integers(2, 12), packed=st.booleans())
def test_tokens_in_are_tokens_out(documents: Documents, length: int, packed: bool) -> None:
    rows = rows_of(documents, length, pack=packed)
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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_whole_documents_fill_rows(lengths: list[int]) -> None:
    rows = best_fit(lengths, 20)
    assert sorted(one for row in rows for one in row) == list(range(len(lengths)))
    assert all(sum(lengths[one] for one in row) <= 20 for row in rows)
    if len(rows) > 1:  # at most one row is less than half full
        assert sorted(sum(lengths[one] for one in row) for row in rows)[1] > 10


@pytest.mark.integrations
@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("kind", ["text", "prompt_completion"])
def test_a_stream_of_rows_resumes_after_any_step(kind: Any, pack: bool) -> None:
    datasets = pytest.importorskip("datasets")
    records = [
        {"text": f"text {one} " * (one % 5), "prompt": f"{one} ", "completion": "x" * (one % 60)}
        for one in range(80)
    ]
    dataset = datasets.Dataset.from_list(records).to_iterable_dataset(num_shards=2)
    text = TextFormat(
        tokenizer=ByteTokenizer(), sequence_length=32, pack=pack, record=RecordFormat(kind=kind)
    )
    rows = TextStream(Records(dataset=dataset, name="texts"), text)

    def loader() -> StreamLoader:
        return StreamLoader(rows, made_up_world(), global_batch_size=2)

    def ids(steps: Any) -> list[Any]:
        return [micro.batch["input_ids"].tolist() for step in steps for micro in step]

    whole = ids(loader().epoch(0))
    if kind == "text":
        tokens = [token for batch in whole for row in batch for token in row if token < 256]
        if pack:
            assert bytes(tokens).startswith(records[1]["text"].encode())
    for stop in range(0, len(whole), 5):
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
    for pack in (True, False):
        # 5 + 3 and 6 + 2 tokens with their ends: no document is cut by a row
        rows = rows_of(documents, 8, pack=pack)
        batch = torch.utils.data.default_collate(rows)
        total, count = language_model(model, batch)
        losses.append((float(total.detach()), int(count)))
        assert len(rows) == (2 if pack else 4)
    assert losses[0][1] == losses[1][1] == 12
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)


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
    samples = [{"text": "two words"}, {"text": "words words"}, {"input_ids": [3, 2]}]
    documents = RecordTokenizer(RecordFormat(), tokenizer).documents(samples)
    found = [list(document.ids) for document in documents if isinstance(document, Tokens)]
    assert found == [[2, 3, 0], [3, 3, 0], [3, 2]]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    with pytest.raises(Impossible, match="has no end token"):
        TransformersTokenizer(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(Impossible, match=r"cannot load the tokenizer .*empty"):
        TransformersTokenizer(str(tmp_path / "empty"))
