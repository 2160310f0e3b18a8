"""Pack documents of any length into rows of one length, for language models.

No token is lost or repeated. A document that does not fit continues in the next row, or with
``whole`` begins the next row. A document is a list of ids, to which the end token is added, or
:class:`Tokens`, which are used unchanged.
"""

from array import array
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch.utils.data import default_collate

from torchmuster.train.data.formats import Tokens
from torchmuster.train.data.streams.reading import Cursor, ShardReader, Source
from torchmuster.train.losses import IGNORED

Row = dict[str, torch.Tensor]


def row_of(
    tokens: torch.Tensor,
    begins: Sequence[int],
    length: int,
    *,
    masked: bool,
    labels: Mapping[int, Sequence[int] | torch.Tensor] | None = None,
) -> Row:
    """Return a row of ``length`` from tokens; documents begin at the positions ``begins``.

    ``labels`` replace the tokens as targets, from each of their positions on.
    """
    filled = len(tokens)
    input_ids = tokens
    if filled < length:
        # Padding is a separate document whose labels are ignored; its token does not matter.
        input_ids = torch.cat([tokens, tokens[-1].expand(length - filled)])
        begins = [*begins, filled]
    learnt = input_ids.clone()
    for place, values in (labels or {}).items():
        learnt[place : place + len(values)] = torch.as_tensor(values)
    learnt[[0, *begins]] = IGNORED
    learnt[filled:] = IGNORED
    row = {"input_ids": input_ids, "labels": learnt, "position_ids": _positions(begins, length)}
    if masked:
        row["attention_mask"] = (torch.arange(length) < filled).long()
    return row


_MULTIPLE = 8  # lengths of batches, for which kernels are fast


def collate_rows(rows: list[Row]) -> Row:
    """Return a batch of padded rows, as long as its longest one needs."""
    batch: Row = default_collate(rows)
    filled = int(batch["attention_mask"].sum(1).max())
    length = -(-filled // _MULTIPLE) * _MULTIPLE
    return {name: tensor[:, :length] for name, tensor in batch.items()}


def _positions(begins: Sequence[int], length: int) -> torch.Tensor:
    places = torch.arange(length)
    if not begins:
        return places
    last_begin = torch.zeros(length, dtype=torch.int64)
    last_begin[list(begins)] = torch.tensor(begins)
    return places - last_begin.cummax(0).values


_DOCUMENTS_AT_ONCE = 16


class PackedRows:
    """Packs consecutive documents into rows. Only a lane's last row has padding."""

    packed = True

    def __init__(
        self, documents: Source, *, sequence_length: int, end: int, whole: bool = False
    ) -> None:
        self._documents = documents
        self._length = sequence_length
        self._end = end
        self._whole = whole

    def lanes(self) -> int:
        """Return the number of lanes."""
        return self._documents.lanes()

    def identity(self) -> str:
        """Return the identity of the source, and the layout."""
        how = "packed" if self.packed else "padded"
        return f"{self._documents.identity()}, {how} to {self._length}"

    def open(
        self, lanes: Sequence[int], *, epoch: int, cursors: Mapping[int, Cursor | None]
    ) -> dict[int, "_RowShardReader"]:
        """Open lanes."""
        at = {lane: cursor["at"] if (cursor := cursors.get(lane)) else None for lane in lanes}
        opened = self._documents.open(lanes, epoch=epoch, cursors=at)
        return {
            lane: _RowShardReader(
                _Documents(one, self._end, cursors.get(lane)),
                self._length,
                packed=self.packed,
                whole=self._whole,
            )
            for lane, one in opened.items()
        }


class PaddedRows(PackedRows):
    """Puts one document, or a part of one, in each row; the rest of the row is padding."""

    packed = False
    collate = staticmethod(collate_rows)


class _RowShardReader:
    def __init__(self, documents: "_Documents", length: int, *, packed: bool, whole: bool) -> None:
        self._documents = documents
        self._length = length
        self._packed = packed
        self._whole = whole

    def read(self, count: int) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < count and (row := self._row()) is not None:
            rows.append(row)
        return rows

    def _row(self) -> Row | None:
        tokens = array("q")  # torch uses its memory directly; it would read a list item by item
        begins = []
        labels: dict[int, Sequence[int]] = {}  # by the position where they begin
        while len(tokens) < self._length and (
            piece := self._documents.take(
                self._length - len(tokens), whole=self._whole and bool(tokens)
            )
        ):
            is_begin, more = piece
            if is_begin:
                begins.append(len(tokens))
            if more.labels is not None:
                labels[len(tokens)] = more.labels
            tokens.extend(more.ids)
            if not self._packed:
                break
        if not tokens:
            return None
        ids = torch.frombuffer(tokens, dtype=torch.int64)
        return row_of(ids, begins, self._length, masked=not self._packed, labels=labels)

    def cursor(self) -> Cursor:
        return self._documents.cursor()

    def close(self) -> None:
        self._documents.close()


class _Documents:
    """Tokens of consecutive documents, each with its end token; tracks the next position."""

    def __init__(self, lane: ShardReader, end: int, cursor: Cursor | None) -> None:
        self._lane = lane
        self._end = end
        self._used = 0  # tokens of the first waiting document
        self._waiting: deque[Tokens] = deque()
        # The last documents were read together: the cursor before them, and how many of them are
        # used up.
        self._at: Cursor = None
        self._gone = 0
        if cursor:
            self._read(cursor["documents"])
            self._drop(cursor["documents"])
            self._used = cursor["tokens"]

    def _read(self, least: int = 0) -> bool:
        """Read more documents, once those read before are used up."""
        self._at, self._gone = self._lane.cursor(), 0
        documents = self._lane.read(max(_DOCUMENTS_AT_ONCE, least + 1))
        self._waiting.extend(
            one if isinstance(one, Tokens) else Tokens([*one, self._end]) for one in documents
        )
        return bool(documents)

    def _drop(self, count: int) -> None:
        for _ in range(count):
            self._waiting.popleft()
        self._gone += count

    def take(self, most: int, *, whole: bool = False) -> tuple[bool, Tokens] | None:
        """Return the next tokens of one document, and whether it begins with them; None at the end.

        ``whole``: None also if the rest of the document is longer than ``most``.
        """
        while True:
            if not self._waiting and not self._read():
                return None
            if self._waiting[0].ids:
                break
            self._drop(1)
        document, begin = self._waiting[0], self._used
        if whole and len(document.ids) - begin > most:
            return None
        end = min(begin + most, len(document.ids))
        labels = document.labels
        self._used = end
        if end == len(document.ids):
            self._drop(1)
            self._used = 0
        return begin == 0, Tokens(
            document.ids[begin:end], None if labels is None else labels[begin:end]
        )

    def cursor(self) -> Cursor:
        if not self._waiting:
            return {"at": self._lane.cursor(), "documents": 0, "tokens": 0}
        return {"at": self._at, "documents": self._gone, "tokens": self._used}

    def close(self) -> None:
        self._lane.close()
