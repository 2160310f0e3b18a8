"""The floating-point operations of a training, counted once by torch's ``FlopCounterMode``.

Counted is what is computed: products of matrices, convolutions and attention, forward and backward, and once more
where activations are recomputed. Code that ``torch.compile`` makes is not looked into: then nothing is counted.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from torchmuster.train.torch_private import TorchDispatchMode, is_compiled_part

_LOWER = (torch.bfloat16, torch.float16)
_NOTHING = nullcontext()


class FlopsPerSample:
    """Counts the first micro-batch that has samples, and leaves all others alone."""

    def __init__(self, model: nn.Module) -> None:
        """Prepare to count a model's; one that is compiled is not counted."""
        self._wanted = not is_compiled(model)
        self.value: float | None = None

    def counting(self, samples: int) -> AbstractContextManager[None]:
        """Count what is computed inside the ``with``, if that has not been done: so many samples."""
        # Asked at every micro-batch: where nothing is counted, nothing is made either.
        return self._count(samples) if self._wanted and samples else _NOTHING

    @contextmanager
    def _count(self, samples: int) -> Iterator[None]:
        self._wanted = False
        with FlopCounterMode(display=False) as counter:
            yield
        self.value = counter.get_total_flops() / samples or None


def is_compiled(model: nn.Module) -> bool:
    """Say whether ``torch.compile`` has made code for a model or a part of it."""
    return any(is_compiled_part(part) for part in model.modules())


class _Types(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes in which types products are computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        if getattr(func, "overloadpacket", None) in flop_registry:
            self.seen.update(one.dtype for one in args[:2] if isinstance(one, torch.Tensor))
        return func(*args, **(kwargs or {}))


class CountedFlops:
    """Counts all that happens from :meth:`begin` to :meth:`end`; ``flops`` is None where that was nothing."""

    def __init__(self) -> None:
        self._modes: list[Any] = []
        self._types = _Types()
        self._counter: Any = FlopCounterMode(display=False)
        self.flops: int | None = None

    def begin(self) -> None:
        """Begin to count what this thread computes, and the backward of it."""
        modes: tuple[Any, ...] = (self._types, self._counter)
        for mode in modes:
            mode.__enter__()
            self._modes.append(mode)

    def end(self) -> None:
        """Stop counting."""
        if self._modes:
            while self._modes:
                self._modes.pop().__exit__(None, None, None)
            self.flops = self._counter.get_total_flops() or None

    @property
    def lower_type(self) -> str | None:
        """The 16-bit type in which products were computed; None if none was."""
        found = [one for one in _LOWER if self._types.seen[one]]
        return str(found[0]).removeprefix("torch.") if found else None
