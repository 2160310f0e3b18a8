"""Count the floating-point operations of a profiled step, with ``FlopCounterMode``.

The count includes matrix products, convolutions and attention, forward and backward, and recomputed
activations. Operations compiled by ``torch.compile`` are not visible: then nothing is counted.
"""

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from torchmuster.train.torch_private import TorchDispatchMode, is_compiled_part

_LOWER = (torch.bfloat16, torch.float16)


def is_compiled(model: nn.Module) -> bool:
    """Return whether ``torch.compile`` has compiled a model or a part of it."""
    return any(is_compiled_part(part) for part in model.modules())


class _Types(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the dtypes in which products are computed."""

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
    """Counts operations from :meth:`begin` to :meth:`end`; ``flops`` is None if there were none."""

    def __init__(self) -> None:
        self._modes: list[Any] = []
        self._types = _Types()
        self._counter: Any = FlopCounterMode(display=False)
        self.flops: int | None = None

    def begin(self) -> None:
        """Start counting this thread's operations and their backward."""
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
        """The 16-bit dtype in which products were computed; None if there was none."""
        found = [one for one in _LOWER if self._types.seen[one]]
        return str(found[0]).removeprefix("torch.") if found else None
