"""Tokenize records in the process that reads them; records with token ids are used unchanged."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchmuster.errors import Impossible
from torchmuster.train.data.formats import (
    WHOLE,
    Document,
    RecordFormat,
    RecordTokenizer,
    Tokenizer,
    Tokens,
    truncated,
)
from torchmuster.train.data.streams.reading import Cursor, ShardReader, Source
from torchmuster.train.data.worker_processes import random_numbers_kept
from torchmuster.train.models.hugging_face import load_tokenizer, save_tokenizer


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
    """A ``transformers`` tokenizer, from a folder or by name.

    ``chat_template`` is a file that replaces the tokenizer's chat template.
    """

    def __init__(
        self,
        name_or_path: str,
        *,
        chat_template: str | None = None,
    ) -> None:
        self.raw = load_tokenizer(name_or_path)
        if self.raw.eos_token_id is None:
            raise Impossible(
                f"the tokenizer {name_or_path} has no end token",
                why="each document ends with it, so that the model learns where documents end",
                fix="set eos_token in the folder's tokenizer_config.json",
            )
        if chat_template is not None:
            try:
                self.raw.chat_template = Path(chat_template).expanduser().read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise Impossible(
                    f"cannot read data.chat_template: {chat_template}",
                    why=getattr(error, "strerror", None) or str(error),
                    fix="give the path of a Jinja file",
                ) from None
        self.end: int = self.raw.eos_token_id
        self.vocabulary: int = len(self.raw)
        self.begin: list[int] = []
        if self._begins_by_itself():
            self.begin = [self.raw.bos_token_id]

    def _begins_by_itself(self) -> bool:
        begin = self.raw.bos_token_id
        return begin is not None and self.raw("a")["input_ids"][:1] == [begin]

    def save(self, folder: Path) -> None:
        """Save the tokenizer, so that ``AutoTokenizer.from_pretrained(folder)`` loads it."""
        save_tokenizer(self.raw, folder)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text."""
        encoded = self.raw(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            # Texts longer than the model's context are packed into several rows: no warning needed.
            verbose=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return [[*self.begin, *one] for one in ids] if self.begin else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens."""
        return str(self.raw.decode(list(ids)))


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return a digest that changes if the tokenizer would give other ids."""
    raw = getattr(tokenizer, "raw", None)
    told = [type(tokenizer).__name__, str(tokenizer.vocabulary)]
    if raw is not None:
        backend = getattr(raw, "backend_tokenizer", None)
        ids = sorted(raw.get_vocab().items()) if backend is None else backend.to_str()
        told += map(str, (ids, raw.chat_template, raw.special_tokens_map, tokenizer.begin))  # type: ignore[attr-defined]
    return hashlib.blake2b("\0".join(told).encode(), digest_size=12).hexdigest()


class Tokenized:
    """A source of documents, from a source of records.

    Without ``how``, a record is a text, an object with a text in ``field``, or token ids: a record
    with ``input_ids`` gives :class:`Tokens`, its ``labels`` are kept, and tokens whose
    ``attention_mask`` is 0 are dropped. Such a record needs no text, and its text is not read. A
    sample that is a list of ids also gives :class:`Tokens`.

    ``how`` reads other formats. ``length`` truncates chats and completions to so many tokens.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        *,
        field: str = "text",
        how: RecordFormat | None = None,
        length: int | None = None,
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._records = RecordTokenizer(how or RecordFormat(text_field=field), tokenizer)
        self._length = length

    def lanes(self) -> int:
        """Return the number of lanes."""
        return self._source.lanes()

    def identity(self) -> str:
        """Return the identity of the source, the tokenizer's vocabulary size, and the format."""
        told = f"{self._source.identity()}, {self._tokenizer.vocabulary} ids"
        usual = RecordFormat(text_field=self._records.how.text_field)
        if self._records.how != usual:
            told += f", {self._records.how.kind}, loss on {self._records.how.train_on}"
        return told + (", with beginning tokens" if getattr(self._tokenizer, "begin", None) else "")

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
        documents = self._records.documents(samples)
        if self._length is None or self._records.how.kind not in WHOLE:
            return documents
        return [
            truncated(one, self._length) if isinstance(one, Tokens) else one for one in documents
        ]


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
