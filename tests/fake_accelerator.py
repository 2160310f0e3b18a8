"""A fake accelerator: torch's functions for devices, streams, events and memory, which record their calls.

Its tensors are on the CPU, so it shows which calls are made, by which thread and in which order, not what they cost.
"""

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch

_empty = torch.empty


@dataclass(frozen=True)
class Call:
    """A call of a function of the accelerator, and the thread that made it."""

    thread: str
    name: str
    argument: Any = None


@dataclass
class FakeAccelerator:
    """Devices of one type. Each thread has its own current device, which is 0 at the beginning."""

    type: str = "cuda"
    devices: tuple[SimpleNamespace, ...] = tuple(
        SimpleNamespace(name=f"GPU {index}", uuid=f"uuid-{index}", major=9, minor=0)
        for index in range(8)
    )
    free_bytes: int = 60 * 2**30
    total_bytes: int = 80 * 2**30
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    calls: list[Call] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)  # sizes, in the order of the allocations
    _current: threading.local = field(default_factory=threading.local)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Self:
        """Replace torch's functions until the end of the test."""
        fake = self

        class Event:
            def __init__(self, device: Any = None, **options: Any) -> None:
                fake.note("Event", device)

            def record(self, stream: Any = None) -> None:
                fake.note("Event.record", stream)

            def query(self) -> bool:
                fake.note("Event.query")
                return True

            def synchronize(self) -> None:
                fake.note("Event.synchronize")

        class Stream:
            def __init__(self, device: Any = None, **options: Any) -> None:
                fake.note("Stream", device)

            def __enter__(self) -> Self:
                fake.note("Stream.__enter__")
                return self

            def __exit__(self, *error: object) -> None:
                fake.note("Stream.__exit__")

            def wait_event(self, event: Any) -> None:
                fake.note("Stream.wait_event", event)

            def synchronize(self) -> None:
                fake.note("Stream.synchronize")

        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(torch, "Stream", Stream)
        monkeypatch.setattr(torch, "empty", self._empty)
        device = torch.device(self.type)
        of_accelerator = {
            "is_available": lambda: True,
            "current_accelerator": lambda check_available=False: device,
            "device_count": lambda: len(self.devices),
            "current_device_index": lambda: getattr(self._current, "index", 0),
            "set_device_index": self._set_device,
            "synchronize": lambda device=None: self.note("synchronize", device),
            "empty_host_cache": lambda: self.note("empty_host_cache"),
        }
        for name, function in of_accelerator.items():
            monkeypatch.setattr(torch.accelerator, name, function)
        of_module = {
            "is_initialized": lambda: True,
            "get_device_properties": lambda device: self.devices[torch.device(device).index],
            "mem_get_info": lambda device=None: (self.free_bytes, self.total_bytes),
            "memory_allocated": lambda device=None: self.allocated_bytes,
            "max_memory_allocated": lambda device=None: self.allocated_bytes,
            "memory_reserved": lambda device=None: self.reserved_bytes,
        }
        for name, function in of_module.items():
            monkeypatch.setattr(getattr(torch, self.type), name, function)
        return self

    def note(self, name: str, argument: Any = None) -> None:
        """Record a call of this thread."""
        self.calls.append(Call(threading.current_thread().name, name, argument))

    def calls_of(self, thread: str) -> list[Call]:
        """Return the calls of a thread, in order."""
        return [call for call in self.calls if call.thread == thread]

    def _set_device(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        self._current.index = index
        self.note("set_device_index", index)

    def _empty(self, *size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        memory: torch.Tensor = _empty(*size, **options)
        if pin_memory:
            self.note("pin_memory", memory.nbytes)
            self.pinned.append(memory.nbytes)
        return memory
