"""Text as rows of tokens for a language model, from files or from a dataset."""

from dataclasses import dataclass, replace
from typing import Any

from torchmuster.train.data.streams.files import Files
from torchmuster.train.data.streams.hugging_face import HuggingFaceStream
from torchmuster.train.data.streams.iterable import Indexed
from torchmuster.train.data.streams.packing import PackedRows, PaddedRows
from torchmuster.train.data.streams.source import Source
from torchmuster.train.data.streams.tokenising import (
    ByteTokenizer,
    Tokenised,
    Tokenizer,
    TransformersTokenizer,
)
from torchmuster.train.data.token_files import TokenRows

TOKEN_FILES = ".safetensors"  # noqa: S105  # tokens of text, and no secret


@dataclass(frozen=True, kw_only=True)
class TextRows:
    """How text becomes rows: by which tokenizer, how long, packed or padded, in which order."""

    tokenizer: Tokenizer | None  # none where files hold tokens already
    sequence_length: int
    pack: bool = True
    field: str = "text"
    seed: int = 0
    shuffle: bool = True

    def in_order(self) -> "TextRows":
        """Return the same without shuffling, for evaluation."""
        return replace(self, shuffle=False)

    def of_files(self, place: str) -> Source | TokenRows:
        """Return the rows of files; those that hold tokens already are taken as they are."""
        if place.endswith(TOKEN_FILES):
            return TokenRows(place, sequence_length=self.sequence_length)
        return self._rows(Files(place, seed=self.seed, shuffle=self.shuffle))

    def of_dataset(self, dataset: Any) -> Source:
        """Return the rows of a dataset of Hugging Face: one with numbers, or a stream."""
        if hasattr(dataset, "__len__"):
            return self._rows(Indexed(dataset, seed=self.seed, shuffle=self.shuffle))
        return self._rows(HuggingFaceStream(dataset))

    def _rows(self, source: Source) -> Source:
        assert self.tokenizer is not None, "text needs a tokenizer"
        documents = Tokenised(source, self.tokenizer, field=self.field)
        documents.check_first()
        laid_out = PackedRows if self.pack else PaddedRows
        return laid_out(documents, sequence_length=self.sequence_length, end=self.tokenizer.end)


def tokenizer_named(name_or_path: str) -> Tokenizer:
    """Return the tokenizer of a name: ``bytes``, a folder, or one on the hub."""
    return ByteTokenizer() if name_or_path == "bytes" else TransformersTokenizer(name_or_path)
