"""The private names of torch that the self-test uses."""

from typing import Any

import torch

from torchmuster.torch_internals import PrivateName

NAMES = (
    PrivateName(
        "torch.cuda._sleep",
        "keep a GPU busy with one long kernel while the host sleeps",
        without="the check idle-process is broken",
    ),
    PrivateName(
        "torch.cuda.memory._record_memory_history",
        "record each allocation of a small training",
        without="the check allocator is broken",
    ),
    PrivateName(
        "torch.cuda.memory._snapshot",
        "read the settings of torch's allocator, and the recorded allocations",
        without="the check allocator is broken",
    ),
)


def occupy_gpu(cycles: int) -> None:
    """Start a kernel that runs for this number of clock cycles; the host does not wait for it."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def record_allocations() -> None:
    """Record every allocation from now on, without stacks."""
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python")


def stop_recording() -> None:
    """Record no more allocations."""
    torch.cuda.memory._record_memory_history(None)


def allocator_snapshot() -> dict[str, Any]:
    """Return torch's description of the memory that its allocator holds."""
    return dict(torch.cuda.memory._snapshot())
