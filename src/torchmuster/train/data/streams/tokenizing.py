"""Tokenize text in the process that reads it; records with token ids are used unchanged."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torchmuster.errors import Impossible, MusterError
from torchmuster.train.data.streams.reading import Cursor, ShardReader, Source
from torchmuster.train.data.worker_processes import random_numbers_kept
from torchmuster.train.losses import IGNORED
from torchmuster.train.models.hugging_face import load_tokenizer, save_tokenizer


class Tokens(NamedTuple):
    """A document given as token ids; no end token is added to it."""

    ids: Sequence[int]
    labels: Sequence[int] | None = None  # None: every token is a target


Document = list[int] | Tokens  # a list comes from a text, and still needs its end token


class Tokenizer(Protocol):
    """Turns texts into ids."""

    @property
    def end(self) -> int:
        """The id of the end token."""
        ...

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary."""
        ...

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without an end token."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids, plus an end token: needs no files, and reads every language."""

    end = 256
    vocabulary = 257

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the bytes of each text."""
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without end tokens."""
        return bytes(one for one in ids if one < 256).decode(errors="replace")


class TransformersTokenizer:
    """A ``transformers`` tokenizer, from a folder or by name; without its special tokens."""

    def __init__(self, name_or_path: str) -> None:
        self._tokenizer = load_tokenizer(name_or_path)
        if self._tokenizer.eos_token_id is None:
            raise Impossible(
                f"the tokenizer {name_or_path} has no end token",
                why="each document ends with it, so that the model learns where documents end",
                fix="set eos_token in the folder's tokenizer_config.json",
            )
        self.end: int = self._tokenizer.eos_token_id
        self.vocabulary: int = len(self._tokenizer)

    def save(self, folder: Path) -> None:
        """Save the tokenizer, so that ``AutoTokenizer.from_pretrained(folder)`` loads it."""
        save_tokenizer(self._tokenizer, folder)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text."""
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            # Texts longer than the model's context are packed into several rows: no warning needed.
            verbose=False,
        )
        return encoded["input_ids"]  # type: ignore[no-any-return]


class Tokenized:
    """A source of documents, from a source of texts, of records with a text field, or of token ids.

    A record with ``input_ids`` gives :class:`Tokens`: its ``labels`` are kept, and tokens whose
    ``attention_mask`` is 0 are dropped. Such a record needs no text, and its text is not read. A
    sample that is a list of ids also gives :class:`Tokens`.
    """

    def __init__(self, source: Source, tokenizer: Tokenizer, *, field: str = "text") -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._field = field

    def lanes(self) -> int:
        """Return the number of lanes."""
        return self._source.lanes()

    def identity(self) -> str:
        """Return the identity of the source, and the tokenizer's vocabulary size."""
        return f"{self._source.identity()}, {self._tokenizer.vocabulary} ids"

    def check_first(self) -> None:
        """Read the first record and raise its error, before anything expensive is built."""
        with random_numbers_kept():
            for lane in range(self.lanes()):
                opened = self._source.open([lane], epoch=0, cursors={})[lane]
                try:
                    if samples := opened.read(1):
                        self._documents(samples)
                        return
                finally:
                    opened.close()

    def open(
        self, lanes: Sequence[int], *, epoch: int, cursors: Mapping[int, Cursor | None]
    ) -> dict[int, "_TokenizedShardReader"]:
        """Open lanes."""
        opened = self._source.open(lanes, epoch=epoch, cursors=cursors)
        return {lane: _TokenizedShardReader(one, self._documents) for lane, one in opened.items()}

    def _documents(self, samples: list[Any]) -> list[Document]:
        found = [self._text_or_tokens(sample) for sample in samples]
        texts = [one for one in found if isinstance(one, str)]
        encoded = iter(self._tokenizer.encode(texts) if texts else [])
        return [next(encoded) if isinstance(one, str) else one for one in found]

    def _text_or_tokens(self, sample: Any) -> str | Tokens:
        record = sample if isinstance(sample, Mapping) else {self._field: sample}
        if record.get("input_ids") is not None:
            return _tokens(record, "input_ids")
        found = record.get(self._field)
        if isinstance(found, str):
            return found
        _refuse_chat(record)
        if isinstance(found, list | tuple) or hasattr(found, "tolist"):
            return _tokens(record, self._field)
        there = f"has {', '.join(map(str, sample))}" if record is sample else ""
        raise MusterError(
            f"a sample has no text in the field {self._field}: it "
            + (there or f"is of type {type(sample).__name__}"),
            why=f"the field holds {type(found).__name__}" if there and found is not None else "",
            fix="set data.text_field to the field that holds the text",
        )


def _tokens(record: Mapping[Any, Any], field: str) -> Tokens:
    """Return the ids that a record has in a field, without padding, and its labels."""
    _refuse_chat({field: record[field]})
    ids = _integers(record, field)
    labels = _integers(record, "labels") if record.get("labels") is not None else None
    if labels is not None and len(labels) != len(ids):
        raise _unusable("labels", f"{len(labels)} labels for {len(ids)} tokens")
    if record.get("attention_mask") is not None:
        mask = _integers(record, "attention_mask")
        if len(mask) != len(ids):
            raise _unusable("attention_mask", f"{len(mask)} entries, {len(ids)} tokens")
        ids = array("q", compress(ids, mask))
        labels = None if labels is None else array("q", compress(labels, mask))
    if (lowest := min(ids, default=0)) < 0:
        raise _unusable(field, f"one of its ids is {lowest}")
    wrong = next((one for one in labels or () if one < 0 and one != IGNORED), None)
    if wrong is not None:
        raise _unusable("labels", f"one of them is {wrong}")
    return Tokens(ids, labels)


def _integers(record: Mapping[Any, Any], field: str) -> "array[int]":
    """Return a field's list of integers; arrays and tensors are accepted."""
    value = record[field]
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise _unusable(field, f"it is of type {type(value).__name__}")
    try:
        return array("q", value)
    except (TypeError, OverflowError):
        wrong = next(one for one in value if not isinstance(one, int) or abs(one) >= 2**63)
        raise _unusable(
            field, f"it has an entry of type {type(wrong).__name__}: {wrong!r:.60}"
        ) from None


def _unusable(field: str, why: str) -> MusterError:
    kinds = {
        "labels": f"one integer for each token: its id, or {IGNORED} for a token to ignore",
        "attention_mask": "one integer for each token: 1, or 0 for padding",
    }
    return MusterError(
        f"a record's field {field} cannot be used",
        why=why,
        fix=f"store {kinds.get(field, 'a list of token ids, which are integers from 0')}",
    )


def _refuse_chat(record: Mapping[Any, Any]) -> None:
    for field, value in record.items():
        first = value[0] if isinstance(value, list | tuple) and value else None
        if isinstance(first, Mapping) and ("role" in first or "from" in first):
            raise MusterError(
                f"a record's field {field} is a list of chat messages, which is not supported yet",
                why="training needs text or token ids",
                fix="store the text of each conversation, and name its field in data.text_field: "
                "tokenizer.apply_chat_template(messages, tokenize=False)",
            )


class _TokenizedShardReader:
    def __init__(self, lane: ShardReader, change: Callable[[list[Any]], list[Document]]) -> None:
        self._lane = lane
        self._change = change

    def read(self, count: int) -> list[Document]:
        samples = self._lane.read(count)
        return self._change(samples) if samples else []

    def cursor(self) -> Cursor:
        return self._lane.cursor()

    def close(self) -> None:
        self._lane.close()
