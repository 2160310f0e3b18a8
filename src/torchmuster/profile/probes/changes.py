"""Apply a change to a training run inside its process, by patching what it builds and calls."""

import inspect
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader

from torchmuster.profile.facts import Change

_BATCH_SIZE = 1  # of a DataLoader by default


class AppliedChange:
    """The change of one run, and whether the training used what it changes."""

    def __init__(self, change: Change | None) -> None:
        self.kind = None if change is None else change.kind
        self._value = 0 if change is None else change.value
        self.used = change is None
        self._saves = 0
        self._device = "cpu"

    def install(self) -> None:
        """Apply what can be applied before the script runs."""
        if self.kind in ("workers", "batch"):
            self._change_loaders()
        elif self.kind == "buckets":
            self._change_ddp()
        elif self.kind == "threads":
            torch.set_num_threads(self._value)
            torch.set_num_threads = lambda nthreads: None
            self.used = True
        elif self.kind == "bf16":
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            self._device = "cpu" if accelerator is None else accelerator.type
            torch.set_autocast_dtype(self._device, torch.bfloat16)
            self.set_autocast(True)
            self._change_autocast()
            self.used = True

    def before_step(self) -> None:
        """Drop the 16-bit copies of the weights, which have changed."""
        if self.kind == "bf16":
            torch.clear_autocast_cache()

    def set_autocast(self, on: bool) -> None:
        """Enable autocast; disable it for the backward, which follows the forward."""
        if self.kind == "bf16":
            torch.set_autocast_enabled(self._device, on)

    def is_to_save(self) -> bool:
        """Return whether this save is executed."""
        if self.kind != "saves":
            return True
        self.used = True
        self._saves += 1
        return self._saves % self._value == 0

    def _change_loaders(self) -> None:
        usual = DataLoader.__init__
        signature = inspect.signature(usual)

        def begin(loader: Any, *positional: Any, **named: Any) -> None:
            arguments = signature.bind(loader, *positional, **named).arguments
            if self.kind == "workers":
                arguments.update(num_workers=self._value, persistent_workers=True)
                self.used = True
            else:
                self._enlarge_batch(arguments)
            del arguments["self"]
            usual(loader, **arguments)

        DataLoader.__init__ = begin  # type: ignore[method-assign, assignment]

    def _enlarge_batch(self, arguments: dict[str, Any]) -> None:
        sampler = arguments.get("batch_sampler")
        size = arguments.get("batch_size", _BATCH_SIZE)
        if isinstance(sampler, BatchSampler):
            sampler.batch_size *= self._value
        elif sampler is None and size is not None:
            arguments["batch_size"] = size * self._value
        else:  # the data set makes the batches
            return
        self.used = True

    def _change_autocast(self) -> None:
        """Enable autocast even if the script passes ``enabled=False`` around its forward."""
        usual = torch.autocast.__init__

        def begin(context: Any, device_type: str, *_: Any, **__: Any) -> None:
            usual(context, device_type, dtype=torch.bfloat16)

        torch.autocast.__init__ = begin  # type: ignore[method-assign, assignment]

    def _change_ddp(self) -> None:
        usual = DistributedDataParallel.__init__

        def begin(model: Any, *positional: Any, **named: Any) -> None:
            self.used = True
            usual(model, *positional, **{**named, "bucket_cap_mb": self._value})

        DistributedDataParallel.__init__ = begin  # type: ignore[method-assign, assignment]
