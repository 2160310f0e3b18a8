"""Chats and completions as tokens and labels, and the rows that are prepared from them."""

import csv
import gzip
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

import tiny_models
from torchmuster.config.settings import Data, Settings
from torchmuster.errors import Impossible, MusterError
from torchmuster.train.data.formats import RecordFormat, RecordTokenizer, Tokens, pieces_of
from torchmuster.train.data.text import (
    Records,
    TextFormat,
    TextRows,
    TextStream,
    open_files,
    rows_of,
    sample_of,
)
from torchmuster.train.data.tokenizers import TransformersTokenizer
from torchmuster.train.losses import IGNORED
from torchmuster.worker.data import open_text

pytestmark = [
    pytest.mark.engine,
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.integrations,
]

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like templates that drop the reasoning of earlier answers.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "tiny"
    return tiny_models.make_model(place, "byte-level", max_position_embeddings=512)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> TransformersTokenizer:
    return TransformersTokenizer(str(model))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def chat(*contents: str) -> list[dict[str, str]]:
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": one} for role, one in zip(roles, contents, strict=False)]


def with_template(model: Path, folder: Path, template: str) -> TransformersTokenizer:
    made = shutil.copytree(model, folder / "with template")
    (made / "chat_template.jinja").write_text(template)
    return TransformersTokenizer(str(made))


def tokens_of(record: Any, tokenizer: TransformersTokenizer, **how: Any) -> Tokens:
    (found,) = RecordTokenizer(RecordFormat(**how), tokenizer).documents([record])
    if isinstance(found, MusterError):
        raise found
    return found


def counted(tokens: Tokens, tokenizer: TransformersTokenizer) -> list[str]:
    return [text for text, counts in pieces_of(tokens, tokenizer) if counts]


CHATS = [
    chat("two foxes?", "2 foxes"),
    chat("a", "b", "c", "d"),
    [{"role": "system", "content": "be brief"}, *chat("foxes?", "dogs, don't they?", "why", "")],
]


@pytest.mark.parametrize("messages", CHATS)
def test_answers_are_found_with_and_without_marks(
    messages: list[dict[str, str]],
    model: Path,
    tokenizer: TransformersTokenizer,
    tmp_path: Path,
) -> None:
    marked = with_template(model, tmp_path, MARKED)
    by_prefixes = tokens_of({"messages": messages}, tokenizer, kind="chat")
    by_marks = tokens_of({"messages": messages}, marked, kind="chat")
    assert by_prefixes == by_marks
    answers = [one["content"] for one in messages if one["role"] == "assistant"]
    assert counted(by_prefixes, tokenizer) == [f"{one}<|im_end|>\n" for one in answers]
    assert tokenizer.decode(by_prefixes.ids) == tokenizer.raw.apply_chat_template(
        messages, tokenize=False
    )


def test_the_names_of_sharegpt_are_read_as_a_chat(tokenizer: TransformersTokenizer) -> None:
    messages = [{"from": "human", "value": "two foxes?"}, {"from": "gpt", "value": "2 foxes"}]
    record = {"conversations": messages}
    assert RecordFormat().recognize(record).value == "chat"
    expected = tokens_of({"messages": CHATS[0]}, tokenizer, kind="chat")
    assert tokens_of(record, tokenizer, kind="chat") == expected


def test_a_template_that_changes_earlier_answers(
    model: Path, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    forgetful = with_template(model, tmp_path, FORGETFUL)
    one = chat("a", "<think>hm</think>b")
    assert counted(tokens_of({"messages": one}, forgetful, kind="chat"), forgetful) == [
        "<think>hm</think>b<|im_end|>\n"
    ]
    with pytest.raises(MusterError) as refused:
        tokens_of({"messages": [*one, *chat("c", "d")]}, forgetful, kind="chat")
    assert str(refused.value) == snapshot


def test_a_completion_counts_and_its_prompt_does_not(tokenizer: TransformersTokenizer) -> None:
    record = {"prompt": "two foxes jump over ", "completion": "3 lazy dogs"}
    found = tokens_of(record, tokenizer, kind="prompt_completion")
    assert found.ids[-1] == tokenizer.end
    assert "".join(counted(found, tokenizer)).endswith("3 lazy dogs<|im_end|>")
    ends_by_itself = {**record, "completion": "3 lazy dogs<|im_end|>"}
    assert tokens_of(ends_by_itself, tokenizer, kind="prompt_completion") == found
    as_messages = {"prompt": chat("two?"), "completion": chat("", "2")[1:]}
    found = tokens_of(as_messages, tokenizer, kind="prompt_completion")
    assert counted(found, tokenizer) == ["2<|im_end|>\n"]


def write_jsonl(path: Path, records: list[Any]) -> str:
    path.write_text("\n".join(json.dumps(one) for one in records) + "\n")
    return str(path)


def write_csv(path: Path, records: list[Any]) -> str:
    with path.open("w", newline="") as file:
        rows = csv.DictWriter(file, records[0])
        rows.writeheader()
        rows.writerows(records)
    return str(path)


def write_parquet(path: Path, records: list[Any]) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return str(path)


def text_format(tokenizer: Any, kind: Any = "chat", **more: Any) -> TextFormat:
    record = RecordFormat(kind=kind)
    return TextFormat(tokenizer=tokenizer, record=record, **{"sequence_length": 64, **more})


def prepared(text: TextFormat, place: str) -> TextRows:
    return rows_of(open_files(place, text.record), text)


@pytest.mark.parametrize(
    ("name", "write"),
    [("a.jsonl", write_jsonl), ("a.csv", write_csv), ("a.parquet", write_parquet)],
)
def test_every_kind_of_file(
    name: str,
    write: Callable[[Path, list[Any]], str],
    tokenizer: TransformersTokenizer,
    tmp_path: Path,
) -> None:
    records = [{"prompt": f"{one},\n ", "completion": f'"{one}" foxes'} for one in range(5)]
    place = write(tmp_path / name, records)
    found = prepared(text_format(tokenizer, "prompt_completion", pack=False), place)
    expected = [tokens_of(one, tokenizer, kind="prompt_completion") for one in records]
    for row, tokens in zip((found[one] for one in range(5)), expected, strict=True):
        size = len(tokens.ids)
        assert row["input_ids"][:size].tolist() == list(tokens.ids)
        assert row["labels"][1:size].tolist() == list(tokens.labels or [])[1:]
        assert row["attention_mask"].sum() == size


def test_what_is_left_out_or_truncated_is_counted(
    tokenizer: TransformersTokenizer, tmp_path: Path
) -> None:
    records = [
        {"messages": chat("foxes", "dogs")},
        {"messages": chat("foxes")},
        {"messages": chat("foxes " * 90, "dogs")},
        {"messages": chat("foxes", "dogs " * 90)},
    ]
    place = write_jsonl(tmp_path / "a.jsonl", records)
    first, *more = prepared(text_format(tokenizer), place).describe(4)
    assert first.startswith("4 records: ")
    assert "; 2 rows, " in first
    assert more == [
        "1 of them are longer than data.sequence_length and were truncated",
        "2 records left out: none of their tokens counts in the loss",
    ]


def test_unusable_records_are_named_with_file_and_line(
    tokenizer: TransformersTokenizer, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    lines = [json.dumps({"messages": chat("a", "b")})] * 9
    lines[2] = json.dumps({"messages": [{"role": "user", "content": None}]})
    lines[4] = "{broken"
    lines[5] = json.dumps({"messages": []})
    lines[7] = json.dumps({"text": "a"})
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(Impossible) as refused:
        prepared(text_format(tokenizer), str(tmp_path / "a.jsonl"))
    assert str(refused.value).replace(str(tmp_path), "FOLDER") == snapshot


def test_a_csv_file_has_text_only(tokenizer: TransformersTokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion\nNA,007\nnull,1.50\n")
    text = text_format(tokenizer, "prompt_completion")
    sample = sample_of(open_files(str(tmp_path / "a.csv"), text.record), text)
    assert "".join(text for text, _ in sample) == "NA007<|im_end|>"


def test_rows_have_another_identity_if_the_data_change(
    tokenizer: TransformersTokenizer, tmp_path: Path
) -> None:
    place = write_jsonl(tmp_path / "a.jsonl", [{"messages": chat("a", "b")}] * 4)
    first = prepared(text_format(tokenizer), place).identity()
    assert prepared(text_format(tokenizer), place).identity() == first
    write_jsonl(tmp_path / "a.jsonl", [{"messages": chat("a", "c")}] * 4)
    assert prepared(text_format(tokenizer), place).identity() != first


def test_streams_of_chats_have_the_same_samples(
    tokenizer: TransformersTokenizer, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    records = [{"messages": chat("foxes " * (one % 7), f"{one} dogs")} for one in range(60)]
    records[5] = {"messages": chat("dogs " * 90, "lost")}
    stream = datasets.Dataset.from_list(records).to_iterable_dataset(num_shards=2)
    whole = prepared(text_format(tokenizer), write_jsonl(tmp_path / "a.jsonl", records))
    rows = TextStream(Records(dataset=stream, name="chats"), text_format(tokenizer))

    def samples(rows: Any) -> list[tuple[int, ...]]:
        found = []
        for row in rows:
            begins = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), 64]
            for begin, end in itertools.pairwise(begins):
                if (row["labels"][begin:end] != IGNORED).any():
                    ids, labels = row["input_ids"][begin:end], row["labels"][begin:end]
                    found.append((*ids.tolist(), *labels.tolist()))
        return sorted(found)

    assert len(samples(rows)) == 59
    assert samples(rows) == samples(whole[index] for index in range(len(whole)))


def test_data_without_records_is_refused(tokenizer: TransformersTokenizer, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    nothing = Records(dataset=datasets.Dataset.from_dict({"messages": []}), name="nothing")
    with pytest.raises(Impossible, match="nothing to train on"):
        rows_of(nothing, text_format(tokenizer))


def test_an_unreadable_compressed_file_is_reported_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise ValueError("Missing a name for object member")

    monkeypatch.setattr(pytest.importorskip("datasets"), "load_dataset", refuse)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "a"}\n{broken\n')
    with pytest.raises(Impossible) as refused:
        open_files(str(tmp_path / "a.jsonl.gz"), RecordFormat())
    assert refused.value.why == "Missing a name for object member"


def test_the_options_of_csv_files_are_the_users(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text;number\n007;007\n")
    options = {"sep": ";", "converters": {"number": str}}
    records = open_files(str(tmp_path / "a.csv"), RecordFormat(), options=options)
    assert records.dataset[0] == {"text": "007", "number": "007"}


def test_evaluation_files_are_read_with_the_same_options(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text;number\na;1\n")
    place = str(tmp_path / "a.csv")
    data = Data(files=place, evaluation=place, tokenizer="bytes", options={"sep": ";"})
    text = open_text(Settings(data=data))
    assert text is not None
    assert text.evaluation is not None
    assert text.evaluation.dataset.column_names == ["text", "number"]
