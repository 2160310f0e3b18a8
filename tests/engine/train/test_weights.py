"""Putting shards together, where they are not on the device that ranks talk over."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchmuster.train import weights

pytestmark = pytest.mark.engine


class Shard:
    """Stands for a DTensor of a mesh of GPUs, which cannot be had here."""

    device_mesh = SimpleNamespace(device_type="cuda")

    def __init__(self, kind: str) -> None:
        self.device = torch.device(kind)

    def to(self, kind: str) -> "Shard":
        return Shard(kind)

    def full_tensor(self) -> str:
        return f"put together on {self.device.type}"


def test_shards_in_the_hosts_memory_are_put_together_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "DTensor", Shard)
    for kind in ("cpu", "cuda"):
        shard: Any = Shard(kind)
        assert weights.whole_tensor(shard) == "put together on cuda"
    whole = torch.ones(1)
    assert weights.whole_tensor(whole) is whole
