"""A limit of what a rank's tensors may take, kept to by the rank itself.

On the CPU nothing else says no before the kernel kills. What is counted is what lives at once, as a caching
allocator without waste would.
"""

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchmuster.plan.torch_private import paused_in_sharding_propagation, storage_id, tree_leaves
from torchmuster.train.torch_private import TorchDispatchMode
from torchmuster.units import format_bytes

# A collective is over for who waits for it before gloo's threads have let go of what they sent. That is less than
# a millisecond, on a machine that has one for them.
_LET_GO_WITHIN_S = 2.0


class Limited(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage that an operation makes, until it is given back."""

    def __init__(self, limit_bytes: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit_bytes = limit_bytes
        self._sizes: dict[int, int] = {}
        self.live_bytes = 0
        self._paused = 0
        self.peak_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._paused:
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
                if local.device.type != "meta":
                    self.see(local.untyped_storage())
        return result

    def pause(self) -> None:
        """Count nothing until :meth:`go_on`."""
        self._paused += 1

    def go_on(self) -> None:
        """Count again."""
        self._paused -= 1

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage with the size it has now; more than the limit is refused."""
        key, size = storage_id(storage), storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        asked = size - self._sizes.get(key, 0)
        self.live_bytes += asked
        self._sizes[key] = size
        if self._limit_bytes is not None and not self._has_room(self._limit_bytes):
            in_use = self.live_bytes - asked
            raise torch.OutOfMemoryError(
                f"out of memory. Tried to allocate {asked} bytes. This rank may use "
                f"{format_bytes(self._limit_bytes)}, of which {format_bytes(in_use)} are in use"
            )
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _has_room(self, limit_bytes: int) -> bool:
        """Say whether all that lives fits; what other threads are about to give back is waited for."""
        until_s = time.monotonic() + _LET_GO_WITHIN_S
        while self.live_bytes > limit_bytes:
            if time.monotonic() > until_s:
                return False
            time.sleep(0.001)
        return True

    def _forget(self, key: int) -> None:
        # In two lines: other threads forget, too, and no call may come between reading the sum and writing it.
        size = self._sizes.pop(key, 0)
        self.live_bytes -= size


@contextmanager
def limited(limit_bytes: int | None) -> Iterator[Limited]:
    """Let tensors made inside the ``with`` take no more than this; None only counts."""
    followed = Limited(limit_bytes)
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:  # FSDP gives memory back by this
        result = resize(storage, size)
        followed.see(storage)
        return result

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
    try:
        # DTensor works out shapes on tensors of the whole model's size, which take no memory.
        with paused_in_sharding_propagation(followed.pause, followed.go_on), followed:
            yield followed
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
