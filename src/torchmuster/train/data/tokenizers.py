"""Tokenizers: UTF-8 bytes, or any of transformers."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from torchmuster.errors import Impossible
from torchmuster.train.models.hugging_face import load_tokenizer


class ByteTokenizer:
    """UTF-8 bytes as ids, plus an end token: needs no files, and reads every language."""

    end = 256
    vocabulary = 257

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the bytes of each text."""
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without end tokens."""
        return bytes(token for token in ids if token < self.end).decode(errors="replace")


class TransformersTokenizer:
    """A ``transformers`` tokenizer, from a folder or by name."""

    def __init__(self, name_or_path: str) -> None:
        self.raw = load_tokenizer(name_or_path)
        if self.raw.eos_token_id is None:
            raise Impossible(
                f"the tokenizer {name_or_path} has no end token",
                why="each document ends with it, so that the model learns where documents end",
                fix="set eos_token in the folder's tokenizer_config.json",
            )
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
        self.raw.save_pretrained(folder)

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
        return [[*self.begin, *document] for document in ids] if self.begin else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens."""
        return str(self.raw.decode(list(ids)))


Tokenizer: TypeAlias = ByteTokenizer | TransformersTokenizer


def tokenizer_named(name_or_path: str) -> Tokenizer:
    """Return a tokenizer by name: ``bytes``, a folder, or one on the hub."""
    if name_or_path == "bytes":
        return ByteTokenizer()
    return TransformersTokenizer(name_or_path)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return a digest that changes if the tokenizer would give other ids."""
    parts = [type(tokenizer).__name__, str(tokenizer.vocabulary)]
    if isinstance(tokenizer, TransformersTokenizer):
        raw = tokenizer.raw
        backend = getattr(raw, "backend_tokenizer", None)
        parts.append(str(sorted(raw.get_vocab().items())) if backend is None else backend.to_str())
        parts += map(str, (raw.chat_template, raw.special_tokens_map, tokenizer.begin))
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()
