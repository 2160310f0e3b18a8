"""Tokens that were made once and are read many times: memory-mapped, any row at once.

A token file is a safetensors file with one tensor ``tokens`` (one long row of uint16, int32 or int64), in
which each document is followed by the end token, whose id is in the file's metadata as ``end``.
"""

import glob
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from torchmuster.errors import Impossible
from torchmuster.train.data.streams.rows import Row, row_of


def write_tokens(path: str | Path, documents: Iterable[Sequence[int]], *, end: int) -> int:
    """Write documents as one token file; return how many tokens it holds, ends included."""
    ids = array("i")
    for document in documents:
        ids.extend(document)
        ids.append(end)
    tokens = torch.frombuffer(ids, dtype=torch.int32) if ids else torch.empty(0, dtype=torch.int32)
    if not ids or int(tokens.max()) < 2**16:
        tokens = tokens.to(torch.uint16)  # half the bytes, for vocabularies below 65536
    save_file({"tokens": tokens}, str(path), metadata={"end": str(end)})
    return len(ids)


class TokenRows(torch.utils.data.Dataset[Row]):
    """Token files as a map-style dataset of packed rows, for ``BatchLoader``. No token is lost.

    Row follows row through a file; the last one of each file is filled up. ``places`` are paths or
    patterns of this machine's files.
    """

    def __init__(self, places: str | Sequence[str], *, sequence_length: int) -> None:
        wanted = [places] if isinstance(places, str) else places
        self._paths = sorted({path for place in wanted for path in glob.glob(place)})  # noqa: PTH207  # whole patterns, not below a folder
        if not self._paths:
            raise Impossible(
                f"there are no token files at {', '.join(wanted)}",
                why="looked for .safetensors files with a tensor named tokens, on this machine",
                fix="check the path, or make the files with write_tokens()",
            )
        self._length = sequence_length
        self._opened: dict[int, Any] = {}
        sizes, self._ends = [], []
        for path in self._paths:
            size, end = _looked_into(path)
            sizes.append(size)
            self._ends.append(end)
        self._sizes = sizes
        self._first_rows = list(
            accumulate((-(-size // sequence_length) for size in sizes), initial=0)
        )

    def __len__(self) -> int:
        return self._first_rows[-1]

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = bisect_right(self._first_rows, index) - 1
        begin = (index - self._first_rows[place]) * self._length
        # The token before tells whether the row begins with a document.
        before = max(begin - 1, 0)
        tokens = self._tokens(place)[before : begin + self._length].long()
        ends = (tokens == self._ends[place]).nonzero().flatten() + 1 - (begin - before)
        tokens = tokens[begin - before :]
        begins = [one for one in ends.tolist() if one < len(tokens)]
        return row_of(tokens, begins if begin else [0, *begins], self._length, masked=False)

    def _tokens(self, place: int) -> Any:
        """Open a file when it is first needed, in the process that needs it."""
        if place not in self._opened:
            file = safe_open(self._paths[place], framework="pt")
            self._opened[place] = file.get_slice("tokens")  # type: ignore[no-untyped-call]
        return self._opened[place]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}


def _looked_into(path: str) -> tuple[int, int]:
    """Return how many tokens a file has, and its end token."""
    try:
        with safe_open(path, framework="pt") as file:
            (size,) = file.get_slice("tokens").get_shape()
            return size, int((file.metadata() or {})["end"])
    except Exception as error:  # safetensors has an error of its own, and others
        raise Impossible(
            f"{path} is not a token file",
            why=f"{type(error).__name__}: {error}",
            fix="make it with write_tokens()",
        ) from None
