"""A limit of what tensors may take: kept to, and no matter how late other threads give something back."""

import threading
from collections.abc import Iterator

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from torchmuster.plan.probes import batch_trial
from torchmuster.plan.probes.batch_trial import limited
from torchmuster.train.out_of_memory import is_out_of_memory
from torchmuster.units import MiB

pytestmark = pytest.mark.engine


@pytest.fixture
def held() -> Iterator[list[torch.Tensor]]:
    """What another thread holds."""
    held: list[torch.Tensor] = []
    yield held
    held.clear()


def test_what_is_too_much_is_refused_as_an_accelerator_does(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(batch_trial, "_LET_GO_WITHIN_S", 0.01)
    with limited(3 * MiB) as followed:
        one = torch.zeros(2 * MiB, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError) as refused:
            torch.zeros(2 * MiB, dtype=torch.uint8)
        assert one.numel() == 2 * MiB
    assert is_out_of_memory(refused.value)
    assert "2097152 bytes" in str(refused.value)
    assert str(refused.value) == snapshot
    assert followed.peak_bytes == 2 * MiB


def test_what_a_thread_gives_back_late_is_waited_for(
    held: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gloo's, which have what they sent in hand for a moment after who waits for them goes on."""
    monkeypatch.setattr(batch_trial, "_LET_GO_WITHIN_S", 60.0)
    with limited(3 * MiB) as followed:
        held.append(torch.zeros(2 * MiB, dtype=torch.uint8))
        late = threading.Timer(0.05, held.clear)
        late.start()
        torch.zeros(2 * MiB, dtype=torch.uint8)
        late.join()
    assert followed.peak_bytes == 2 * MiB
