"""Host memory that tensors are copied to, so that the training may change them while they are written.

torch's own ``DefaultStager`` copies the whole state of every rank before it is known which rank writes what: with ddp every rank
would keep a copy of everything. Here a rank copies only what it writes, after the ranks have divided that up.
The memory is kept for the next save.
"""

from collections.abc import Iterator, Sequence

import torch

from torchmuster.train.checkpointing.host_bytes import pieces_of


class Staging:
    """A piece of host memory, as large as what a rank writes. Used by one save at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_host = device.type == "cpu"
        self._memory = torch.empty(0, dtype=torch.uint8)

    def ready(self) -> "torch.Event | None":
        """Return what marks all that the device was told to do so far; the copy waits for it."""
        if self._on_host:
            return None
        event = torch.Event(self._device)
        event.record()
        return event

    def take(
        self, tensors: Sequence[torch.Tensor], after: "torch.Event | None"
    ) -> Iterator[memoryview]:
        """Copy the tensors one after the other; return their bytes in pieces, to be read when there is time."""
        size_bytes = sum(one.nbytes for one in tensors)
        if len(self._memory) < size_bytes:
            # Memory that is pinned is copied to by the device itself, while the host does something else.
            self._memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=not self._on_host)
        if self._on_host:
            self._copy(tensors)
        else:
            # A stream of its own: the copy need not wait for the forward that is queued meanwhile.
            stream = torch.Stream(self._device)
            with stream:
                if after is not None:
                    stream.wait_event(after)
                self._copy(tensors)
            stream.synchronize()
        return pieces_of(self._memory[:size_bytes])

    def release(self) -> None:
        """Give the memory back."""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _copy(self, tensors: Sequence[torch.Tensor]) -> None:
        begin = 0
        for tensor in tensors:
            end = begin + tensor.nbytes
            room = self._memory[begin:end].view(tensor.dtype).view(tensor.shape)
            room.copy_(tensor, non_blocking=not self._on_host)
            begin = end
