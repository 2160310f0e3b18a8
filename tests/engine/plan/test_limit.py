"""A limit of tensor memory on a CPU: kept to, also where other threads free memory late."""

import threading

import pytest
import torch

from torchmuster.plan.probes import real_steps
from torchmuster.plan.probes.real_steps import peaks_of_tensors
from torchmuster.train.out_of_memory import is_out_of_memory
from torchmuster.units import MiB

pytestmark = pytest.mark.engine
CPU = torch.device("cpu")


def test_too_much_is_refused_as_an_accelerator_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_steps, "_FREED_WITHIN_S", 0.01)
    with peaks_of_tensors(CPU, 3 * MiB) as read_peak:
        tensor = torch.zeros(2 * MiB, dtype=torch.uint8)
        assert read_peak() == 2 * MiB
        with pytest.raises(torch.OutOfMemoryError) as refused:
            torch.zeros(2 * MiB, dtype=torch.uint8)
        assert tensor.numel() == 2 * MiB
    assert is_out_of_memory(refused.value)
    assert "Tried to allocate 2097152 bytes" in str(refused.value)


def test_memory_that_a_thread_frees_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's threads hold what they send for a moment after the collective has returned."""
    monkeypatch.setattr(real_steps, "_FREED_WITHIN_S", 60.0)
    held: list[torch.Tensor] = []
    with peaks_of_tensors(CPU, 3 * MiB) as read_peak:
        held.append(torch.zeros(2 * MiB, dtype=torch.uint8))
        late = threading.Timer(0.05, held.clear)
        late.start()
        torch.zeros(2 * MiB, dtype=torch.uint8)
        late.join()
        read_peak()
        assert read_peak() == 0
