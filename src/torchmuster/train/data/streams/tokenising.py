"""Text to tokens, in the process that reads it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torchmuster.errors import Impossible, MusterError
from torchmuster.train.data.streams.source import Cursor, Lane, Source


class Tokenizer(Protocol):
    """Turns texts into ids."""

    @property
    def end(self) -> int:
        """The id that closes a document."""
        ...

    @property
    def vocabulary(self) -> int:
        """How many ids there are."""
        ...

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without an end."""
        ...


class ByteTokenizer:
    """The bytes of UTF-8 as ids, and one more for the end: needs nothing, and reads every language."""

    end = 256
    vocabulary = 257

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the bytes of each text."""
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; ends are left out."""
        return bytes(one for one in ids if one < 256).decode(errors="replace")


class TransformersTokenizer:
    """A tokenizer of ``transformers``, from a folder or by its name; without the ids it would put around."""

    def __init__(self, name_or_path: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise Impossible(
                f"the tokenizer {name_or_path} needs transformers, which is not installed",
                fix="pip install 'torchmuster[transformers]'; or use the tokenizer bytes",
            ) from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name_or_path)
        except (OSError, ValueError) as error:
            raise Impossible(
                f"the tokenizer {name_or_path} cannot be loaded",
                why=str(error).splitlines()[0],
                fix="give the folder of a tokenizer, or a name that can be downloaded from here",
            ) from None
        if self._tokenizer.eos_token_id is None:
            raise Impossible(
                f"the tokenizer {name_or_path} has no end token",
                why="documents are closed with it, so that the model learns where they end",
                fix="set eos_token in the folder's tokenizer_config.json",
            )
        self.end: int = self._tokenizer.eos_token_id
        self.vocabulary: int = len(self._tokenizer)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text."""
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            # Texts longer than the model's context are packed into several rows: no warning is due.
            verbose=False,
        )
        return encoded["input_ids"]  # type: ignore[no-any-return]


class Tokenised:
    """A source of documents as lists of ids, from one of texts or of records with a text in them.

    A sample that is a list of ids already (under ``input_ids`` in a record) is passed on.
    """

    def __init__(self, source: Source, tokenizer: Tokenizer, *, field: str = "text") -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._field = field

    def lanes(self) -> int:
        """Return the number of lanes."""
        return self._source.lanes()

    def identity(self) -> str:
        """Return what is read, and by which tokenizer."""
        return f"{self._source.identity()}, {self._tokenizer.vocabulary} ids"

    def open(
        self, lanes: Sequence[int], *, epoch: int, cursors: Mapping[int, Cursor | None]
    ) -> dict[int, "_TokenisedLane"]:
        """Begin to read lanes."""
        opened = self._source.open(lanes, epoch=epoch, cursors=cursors)
        return {lane: _TokenisedLane(one, self._ids) for lane, one in opened.items()}

    def _ids(self, samples: list[Any]) -> list[list[int]]:
        texts = [self._text(sample) for sample in samples]
        encoded = iter(self._tokenizer.encode([one for one in texts if isinstance(one, str)]))
        return [next(encoded) if isinstance(one, str) else one for one in texts]

    def _text(self, sample: Any) -> str | list[int]:
        found = sample
        if isinstance(sample, Mapping):
            found = sample.get(self._field, sample.get("input_ids"))
        if isinstance(found, str | list):
            return found
        there = f"has {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else ""
        raise MusterError(
            f"a sample has no text in the field {self._field}: it "
            + (there or f"is of the type {type(sample).__name__}"),
            why=f"the field holds {type(found).__name__}" if there and found is not None else "",
            fix="name the field that holds the text",
        )


class _TokenisedLane:
    def __init__(self, lane: Lane, change: Callable[[list[Any]], list[list[int]]]) -> None:
        self._lane = lane
        self._change = change

    def read(self, count: int) -> list[list[int]]:
        samples = self._lane.read(count)
        return self._change(samples) if samples else []

    def cursor(self) -> Cursor:
        return self._lane.cursor()

    def close(self) -> None:
        self._lane.close()
