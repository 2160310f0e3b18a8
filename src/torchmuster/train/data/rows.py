"""Rows: documents of tokens laid out in rows of one length, packed or padded.

A packed row has no attention mask: its ``position_ids`` begin at 0 for each document, from which
transformers masks attention between documents.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.utils.data import default_collate

from torchmuster.train.data.formats import Tokens
from torchmuster.train.losses import IGNORED

Row = dict[str, torch.Tensor]

MULTIPLE = 8  # lengths of padded batches, for which kernels are fast


class Layout(NamedTuple):
    """The tokens of one row without padding, and where its documents begin."""

    ids: Sequence[int]
    labels: Sequence[int]
    begins: Sequence[int]


def lay_out(documents: Iterable[Tokens], length: int, *, pack: bool, whole: bool) -> list[Layout]:
    """Return the rows of documents. No token is lost.

    ``whole`` documents are at most as long as a row, and are never cut: they are placed so that few
    tokens are padding. Other documents continue in the next row.
    """
    parts = [document for document in documents if document.ids]
    if not whole:
        parts = _cut(parts, length, pack=pack)
        if pack:
            return _join_in_order(parts, length)
    if not pack:
        return [_joined([part]) for part in parts]
    rows = best_fit([len(part.ids) for part in parts], length)
    return [_joined([parts[number] for number in row]) for row in rows]


def _cut(documents: Iterable[Tokens], length: int, *, pack: bool) -> list[Tokens]:
    """Cut documents where a row ends: all in one sequence if packed, else each by itself."""
    parts = []
    filled = 0
    for document in documents:
        begin = 0
        while begin < len(document.ids):
            end = begin + length - filled
            labels = None if document.labels is None else document.labels[begin:end]
            part = Tokens(document.ids[begin:end], labels)
            parts.append(part)
            begin += len(part.ids)
            filled = (filled + len(part.ids)) % length if pack else 0
    return parts


def _join_in_order(parts: Iterable[Tokens], length: int) -> list[Layout]:
    rows = []
    row: list[Tokens] = []
    filled = 0
    for part in parts:
        row.append(part)
        filled += len(part.ids)
        if filled == length:
            rows.append(_joined(row))
            row, filled = [], 0
    if row:
        rows.append(_joined(row))
    return rows


def _joined(parts: Iterable[Tokens]) -> Layout:
    """Join documents; the first token of each has no context, so it is no target."""
    ids: list[int] = []
    labels: list[int] = []
    begins = []
    for part in parts:
        begins.append(len(ids))
        ids.extend(part.ids)
        labels.append(IGNORED)
        labels.extend((part.ids if part.labels is None else part.labels)[1:])
    return Layout(ids, labels, begins)


def best_fit(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Return which documents share a row: longest first, each into the fullest row with enough space."""
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # the space left in a row, and the row's number; sorted
    for document in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        need = lengths[document]
        position = bisect_left(spaces, (need, 0))
        if position == len(spaces):
            space, row = length, len(rows)
            rows.append([])
        else:
            space, row = spaces.pop(position)
        rows[row].append(document)
        if space > need:
            insort(spaces, (space - need, row))
    return sorted(sorted(row) for row in rows)


def row_of(layout: Layout, length: int, *, masked: bool) -> Row:
    """Return the tensors of a row, padded to ``length``."""
    filled = len(layout.ids)
    padding = length - filled
    begins = list(layout.begins)
    if padding:
        begins.append(filled)  # padding is a document of its own whose labels are ignored
    positions = torch.arange(length)
    last_begin = torch.zeros(length, dtype=torch.int64)
    last_begin[begins] = torch.tensor(begins)
    row = {
        "input_ids": torch.tensor([*layout.ids, *[layout.ids[-1]] * padding]),
        "labels": torch.tensor([*layout.labels, *[IGNORED] * padding]),
        "position_ids": positions - last_begin.cummax(0).values,
    }
    if masked:
        row["attention_mask"] = (positions < filled).long()
    return row


def collate_rows(rows: list[Row]) -> Row:
    """Return a batch of padded rows, as long as its longest one needs."""
    batch: Row = default_collate(rows)
    filled = int(batch["attention_mask"].sum(1).max())
    length = -(-filled // MULTIPLE) * MULTIPLE
    return {name: tensor[:, :length] for name, tensor in batch.items()}
