"""Changes applied to a training run inside its process, by patching what it builds and calls.

The script is not edited. A change that had no effect is reported.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader

from torchmuster.bench.profile.changes import TriedChange


class TriedChanges:
    """The changes of one run, and which of them had an effect."""

    def __init__(self, changes: Sequence[TriedChange]) -> None:
        self._values = {change.kind: change.value for change in changes}
        self._changes = {change.kind: change for change in changes}
        self._used: set[str] = set()
        self._saves = 0
        self._device = "cpu"
        self._last_read: dict[Any, Any] = {}
        self._reads_now = True

    def install(self) -> None:
        """Apply the changes that can be applied before the script runs."""
        if {"workers", "batch"} & self._values.keys():
            self._change_loaders()
        if "buckets" in self._values:
            self._change_ddp()
        if "threads" in self._values:
            torch.set_num_threads(self._values["threads"])
            torch.set_num_threads = lambda nthreads: None
            self._used.add("threads")
        if "bf16" in self._values:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            self._device = "cpu" if accelerator is None else accelerator.type
            torch.set_autocast_dtype(self._device, torch.bfloat16)
            self.set_autocast(True)
            self._change_autocast()
            self._used.add("bf16")

    @property
    def unused(self) -> list[str]:
        """The changes that had no effect."""
        return [
            f"{change} had no effect: the training does not use it"
            for kind, change in self._changes.items()
            if kind not in self._used
        ]

    def before_step(self, number: int) -> None:
        """Note the start of a step."""
        self._reads_now = number % self._values.get("reads", 1) == 0
        if "bf16" in self._values:
            torch.clear_autocast_cache()  # the weights have changed

    def set_autocast(self, on: bool) -> None:
        """Enable autocast; disable it for the backward, which follows the forward."""
        if "bf16" in self._values:
            torch.set_autocast_enabled(self._device, on)

    def read(self, key: Any, really: Callable[[], Any]) -> Any:
        """Read a value, or return the previous one in a step without reads."""
        if "reads" not in self._values:
            return really()
        self._used.add("reads")
        if self._reads_now or key not in self._last_read:
            self._last_read[key] = really()
        return self._last_read[key]

    def is_to_save(self) -> bool:
        """Return whether this save is executed."""
        if "saves" not in self._values:
            return True
        self._used.add("saves")
        self._saves += 1
        return self._saves % self._values["saves"] == 0

    def _change_loaders(self) -> None:
        usual = DataLoader.__init__
        signature = inspect.signature(usual)

        def begin(loader: Any, *words: Any, **named: Any) -> None:
            given = signature.bind(loader, *words, **named).arguments
            if "workers" in self._values:
                given["num_workers"] = self._values["workers"]
                given["persistent_workers"] = True
                self._used.add("workers")
            sampler = given.get("batch_sampler")
            if "batch" in self._values and isinstance(sampler, BatchSampler):
                sampler.batch_size *= self._values["batch"]
                self._used.add("batch")
            elif "batch" in self._values and sampler is None:
                given["batch_size"] = given.get("batch_size", 1) * self._values["batch"]
                self._used.add("batch")
            del given["self"]
            usual(loader, **given)

        DataLoader.__init__ = begin  # type: ignore[method-assign, assignment]

    def _change_autocast(self) -> None:
        """Enable autocast even if the script passes ``enabled=False`` around its forward."""
        usual = torch.autocast.__init__

        def begin(context: Any, device_type: str, *words: Any, **named: Any) -> None:
            usual(context, device_type, dtype=torch.bfloat16)

        torch.autocast.__init__ = begin  # type: ignore[method-assign, assignment]

    def _change_ddp(self) -> None:
        usual = DistributedDataParallel.__init__

        def begin(model: Any, *words: Any, **named: Any) -> None:
            self._used.add("buckets")
            usual(model, *words, **{**named, "bucket_cap_mb": self._values["buckets"]})

        DistributedDataParallel.__init__ = begin  # type: ignore[method-assign, assignment]
