"""Record what the learner's code does, without changing its results."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from torchmuster.labs.torch_private import TorchDispatchMode


@dataclass
class Calls:
    """The calls of one function, in order."""

    all: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.all)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a name temporarily."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def watched(owner: Any, name: str, before: Callable[..., object] | None = None) -> Iterator[Calls]:
    """Record the calls of a function; ``before`` gets the arguments of each call first."""
    calls = Calls()
    original = getattr(owner, name)

    def watching(*words: Any, **named: Any) -> Any:
        calls.all.append((words, named))
        if before is not None:
            before(*words, **named)
        return original(*words, **named)

    with replaced(owner, name, watching):
        yield calls


class SavedBytes:
    """Counts what autograd saves for backward, each storage once, without parameters.

    ``with_repeats`` counts a storage each time it is saved.
    """

    def __init__(self, parameters: Any) -> None:
        self._parameters = {one.untyped_storage().data_ptr() for one in parameters}
        self._known = set(self._parameters)
        self.total = self.with_repeats = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda one: one)

    def _pack(self, saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self.with_repeats += storage.nbytes()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self.total += storage.nbytes()
        return saved

    def __enter__(self) -> "SavedBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``seen(name, result)`` for every operation below autograd."""

    def __init__(self, seen: Callable[[str, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._seen(func.overloadpacket.__name__, result)
        return result
