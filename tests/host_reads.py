"""Counts what the host reads of tensors that a device would have to compute first."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchmuster.train.progress import progress
from torchmuster.train.step import HostCopy

# Methods that end in Python or in the host's memory; on the CPU most of them reach no operation of torch.
_METHODS = {
    getattr(torch.Tensor, name)
    for name in (
        *("item", "tolist", "numpy", "cpu", "nonzero", "is_nonzero", "equal", "allclose", "unique"),
        *("__bool__", "__int__", "__float__", "__index__", "__contains__", "__format__"),
    )
}
# Operations whose results, or the sizes of them, the host must know.
_OPERATIONS = {
    one.default
    for one in (
        torch.ops.aten._local_scalar_dense,
        torch.ops.aten.equal,
        torch.ops.aten.is_nonzero,
        torch.ops.aten.nonzero,
        torch.ops.aten.masked_select,
    )
}


class HostReads:
    """What the host read, and in which step.

    Numbers that were sent to the host before, and are read at least one step later, do not count: they are not
    the device's any more. ``copies`` has the steps in which they were sent and read.
    """

    def __init__(self) -> None:
        self.reads: list[tuple[int, str]] = []
        self.copies: list[tuple[int, int]] = []
        self.allowed = False

    def in_steps(self, first: int, last: int) -> list[tuple[int, str]]:
        return [one for one in self.reads if first <= one[0] <= last]

    def note(self, name: str) -> None:
        if not self.allowed:
            self.reads.append((progress.step or 0, name))


@contextmanager
def host_reads() -> Iterator[HostReads]:
    """Give what the host reads inside the ``with``."""
    seen = HostReads()
    sent: dict[int, int] = {}
    made, read = HostCopy.__init__, HostCopy.read

    def noted_made(copy: HostCopy, numbers: torch.Tensor) -> None:
        made(copy, numbers)
        sent[id(copy)] = progress.step or 0

    def noted_read(copy: HostCopy) -> list[float]:
        seen.copies.append((sent[id(copy)], progress.step or 0))
        seen.allowed = seen.copies[-1][0] < seen.copies[-1][1]
        try:
            return read(copy)
        finally:
            seen.allowed = False

    with (
        patch.object(HostCopy, "__init__", noted_made),
        patch.object(HostCopy, "read", noted_read),
        _Operations(seen),
        _Methods(seen),
    ):
        yield seen


class _Methods(TorchFunctionMode):
    def __init__(self, seen: HostReads) -> None:
        self._seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _METHODS:
            self._seen.note(func.__name__)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seen: HostReads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OPERATIONS:
            self._seen.note(str(func))
        return func(*args, **(kwargs or {}))
