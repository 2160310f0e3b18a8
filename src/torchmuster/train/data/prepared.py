"""Chats and completions as rows, tokenized once before training and stored in one file.

All records are read: each is checked, its length is known, and so is the number of rows. The file
is memory-mapped by all ranks and workers of a host, and used again by later runs with the same data.
"""

import hashlib
import json
import os
import time
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from torchmuster.errors import Impossible, MusterError
from torchmuster.train.data.formats import (
    Document,
    RecordTokenizer,
    Tokenizer,
    Tokens,
    pieces_of,
    truncated,
)
from torchmuster.train.data.records import Record
from torchmuster.train.data.streams.packing import Row, collate_rows, row_of
from torchmuster.train.losses import IGNORED
from torchmuster.units import plural

_RECORDS_AT_ONCE = 64
_SHOWN = 5  # bad records named in an error
_SAY_EVERY_S = 5.0
_UNUSED_AFTER_S = 30 * 86400.0


@dataclass(frozen=True, kw_only=True)
class PreparedFacts:
    """What was prepared, and what was left out."""

    records: int
    left_out: int  # without a token that counts in the loss
    truncated: int
    lost_tokens: int  # of truncated records
    tokens: int
    trained_tokens: int
    rows: int
    row_tokens: int  # tokens of all rows, with padding
    sample: list[tuple[str, bool]] = field(default_factory=list)  # the first record: see pieces_of

    def lines(self) -> list[str]:
        """Describe the data."""
        share = 100 * self.trained_tokens / max(self.tokens, 1)
        full = 100 * self.tokens / max(self.row_tokens, 1)
        told = [
            f"{plural(self.records, 'record')}: {self.tokens:,} tokens, {share:.0f} % of them count "
            f"in the loss; {plural(self.rows, 'row')}, {full:.0f} % full"
        ]
        if self.truncated:
            told.append(
                f"{self.truncated:,} of them are longer than data.sequence_length and were "
                f"truncated: {self.lost_tokens:,} tokens are not used"
            )
        if self.left_out:
            told.append(
                f"{plural(self.left_out, 'record')} left out: none of their tokens counts in the loss"
            )
        return told


class PreparedRows(torch.utils.data.Dataset[Row]):
    """The rows of a prepared file, as a map-style dataset for ``BatchLoader``."""

    def __init__(self, path: Path, *, sequence_length: int, pack: bool) -> None:
        self._path = path
        self._length = sequence_length
        self._pack = pack
        self._opened: Any = None
        with safe_open(str(path), framework="pt") as file:
            self.facts = _facts(file.metadata())
            self._documents = file.get_tensor("documents")  # where each begins, and the end
            self._members = file.get_tensor("members")  # the documents of all rows
            self._rows = file.get_tensor("rows")  # where each begins in members, and the end
        self.collate = None if pack else collate_rows

    def identity(self) -> str:
        """Return the name of the file, which depends on everything that determines its content."""
        return self._path.stem

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._opened is None:  # in the process that uses it
            file = safe_open(str(self._path), framework="pt")
            self._opened = (file.get_slice("tokens"), file.get_slice("counted"))  # type: ignore[no-untyped-call]
        tokens, counted = self._opened
        begins: list[int] = []
        ids: list[torch.Tensor] = []
        labels: list[torch.Tensor] = []
        filled = 0
        for member in self._members[self._rows[index] : self._rows[index + 1]].tolist():
            begin, end = self._documents[member : member + 2].tolist()
            own = tokens[begin:end].long()
            ids.append(own)
            labels.append(own.masked_fill(counted[begin:end] == 0, IGNORED))
            begins.append(filled)
            filled += end - begin
        return row_of(
            torch.cat(ids),
            begins,
            self._length,
            masked=not self._pack,
            labels={0: torch.cat(labels)},
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


def prepared_path(folder: Path, *parts: object) -> Path:
    """Return the path of a prepared file, by everything that its content depends on."""
    import transformers

    from torchmuster import __version__

    told = json.dumps([__version__, transformers.__version__, *parts], sort_keys=True, default=str)
    return folder / f"{hashlib.blake2b(told.encode(), digest_size=12).hexdigest()}.safetensors"


def prepare_rows(
    path: Path,
    records: Iterable[Record],
    convert: RecordTokenizer,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    pack: bool,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Tokenize all records and write them to a file; raise with the places of unusable ones."""
    ids, counted = array("i"), bytearray()
    documents = array("q", [0])
    seen = left_out = cut = lost = 0
    sample: list[tuple[str, bool]] = []
    wrong: list[tuple[str, MusterError]] = []
    said = time.monotonic()
    iterator = iter(records)
    while some := list(islice(iterator, _RECORDS_AT_ONCE)):
        seen += len(some)
        for record, document in zip(some, _documents(some, convert), strict=True):
            if isinstance(document, MusterError):
                wrong.append((record.place, document))
                continue
            short = truncated(document, sequence_length)
            if not short.ids:
                left_out += 1
                continue
            if len(document.ids) > sequence_length:
                cut += 1
                lost += len(document.ids) - sequence_length
            sample = sample or pieces_of(short, tokenizer)
            ids.extend(short.ids)
            labels = short.ids if short.labels is None else short.labels
            counted.extend(bytearray(one != IGNORED for one in labels))
            counted[documents[-1]] = 0  # the first token has no context
            documents.append(len(ids))
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            say(f"tokenizing: {seen:,} records, {len(ids):,} tokens")
    refuse_records(wrong, seen)
    if len(documents) == 1:
        raise Impossible(
            "there is nothing to train on",
            why=f"none of {plural(seen, 'record')} has a token that counts in the loss",
            fix="check the data: each conversation needs an answer within data.sequence_length",
        )
    lengths = [end - begin for begin, end in pairwise(documents)]
    rows = pack_whole(lengths, sequence_length) if pack else [[one] for one in range(len(lengths))]
    begins = array("q", [0])
    for row in rows:
        begins.append(begins[-1] + len(row))
    facts = PreparedFacts(
        records=seen,
        left_out=left_out,
        truncated=cut,
        lost_tokens=lost,
        tokens=len(ids),
        trained_tokens=sum(counted),
        rows=len(rows),
        row_tokens=len(rows) * sequence_length if pack else len(ids),
        sample=sample,
    )
    _write_rows(
        path,
        {
            "tokens": torch.frombuffer(ids, dtype=torch.int32),
            "counted": torch.frombuffer(counted, dtype=torch.uint8),
            "documents": torch.frombuffer(documents, dtype=torch.int64),
            "members": torch.tensor([one for row in rows for one in row], dtype=torch.int64),
            "rows": torch.frombuffer(begins, dtype=torch.int64),
        },
        facts,
    )


def open_prepared(path: Path, *, sequence_length: int, pack: bool) -> PreparedRows | None:
    """Open a prepared file; None if it does not exist or is damaged."""
    try:
        rows = PreparedRows(path, sequence_length=sequence_length, pack=pack)
    except Exception:  # safetensors has an error of its own, and others
        return None
    with suppress(OSError):
        os.utime(path)  # it is in use
    return rows


def pack_whole(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return which documents share a row, so that few tokens are padding: best fit, longest first."""
    rows: list[list[int]] = []
    left: dict[int, list[int]] = {}  # rows by the room that is left in them
    rooms: list[int] = []  # the keys of left, sorted
    for document in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        need = lengths[document]
        at = bisect_left(rooms, need)
        if at == len(rooms):
            room, row = most, len(rows)
            rows.append([])
        else:
            room = rooms[at]
            row = left[room].pop()
            if not left[room]:
                del left[room], rooms[at]
        rows[row].append(document)
        if rest := room - need:
            if rest not in left:
                left[rest] = []
                insort(rooms, rest)
            left[rest].append(row)
    return sorted(sorted(row) for row in rows)


def _documents(records: Sequence[Record], convert: RecordTokenizer) -> list[Tokens | MusterError]:
    """Convert records together, or one by one if one of them is unusable."""
    if not any(one.error for one in records):
        try:
            return [_as_tokens(one) for one in convert.documents([one.value for one in records])]
        except Impossible:
            raise
        except MusterError:
            pass
    found: list[Tokens | MusterError] = []
    for record in records:
        try:
            if record.error is not None:
                raise record.error
            found += map(_as_tokens, convert.documents([record.value]))
        except Impossible:
            raise
        except MusterError as error:
            found.append(error)
    return found


def _as_tokens(document: Document) -> Tokens:
    assert isinstance(document, Tokens), "chats and completions have their end tokens"
    return document


def refuse_records(wrong: Sequence[tuple[str, MusterError]], seen: int) -> None:
    """Raise an error with the places of unusable records, if there are any."""
    if not wrong:
        return
    told = [
        ": ".join(filter(None, (place, error.what, error.why))) for place, error in wrong[:_SHOWN]
    ]
    if len(wrong) > _SHOWN:
        told.append(f"and {len(wrong) - _SHOWN:,} more")
    raise Impossible(
        f"{len(wrong):,} of {plural(seen, 'record')} cannot be used",
        why="\n".join(told),
        fix=wrong[0][1].fix or "fix or remove these records",
    )


def _write_rows(path: Path, tensors: dict[str, torch.Tensor], facts: PreparedFacts) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_unused(path.parent)
        save_file(tensors, str(unfinished), metadata={"facts": json.dumps(asdict(facts))})
        unfinished.replace(path)
    except OSError as error:
        raise MusterError(
            f"cannot write the prepared data to {path}",
            why=error.strerror or str(error),
            fix="free disk space there, or set XDG_CACHE_HOME to a folder on another disk",
        ) from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _remove_unused(folder: Path) -> None:
    for one in folder.glob("*.safetensors"):
        with suppress(OSError):
            if time.time() - one.stat().st_mtime > _UNUSED_AFTER_S:
                one.unlink()


def _facts(metadata: dict[str, str]) -> PreparedFacts:
    told = json.loads(metadata["facts"])
    return PreparedFacts(**{**told, "sample": [(text, bool(one)) for text, one in told["sample"]]})
