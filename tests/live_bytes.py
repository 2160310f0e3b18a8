"""How many bytes of tensors live: every storage that an operation makes, until it is given back.

Torch's profiler would tell more, but not what gloo's threads give back. What gloo itself copies is not seen.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts from when it was entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
                if local.device.type != "meta":
                    self.see(local.untyped_storage())
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage with the size it has now."""
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        size = storage.nbytes()
        more = size - self._sizes.get(key, 0)
        self.live += more
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        # In two lines, as above: other threads forget, too, and no call may come between reading the sum and writing it.
        size = self._sizes.pop(key, 0)
        self.live -= size

    def begin_again(self) -> None:
        """Look for a new peak from here."""
        self.peak = self.live


@contextmanager
def live_bytes() -> Iterator[LiveBytes]:
    """Follow every storage inside the ``with``."""
    found = LiveBytes()
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:  # FSDP gives memory back by this
        result = resize(storage, size)
        found.see(storage)
        return result

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
    try:
        with found:
            yield found
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
