"""A small training whose allocations are recorded, in a rank started as ``muster train`` starts ranks."""

from typing import Any

import torch
from torch import nn

from torchmuster.selftest.probes.answering import Request, answer_request
from torchmuster.selftest.torch_private import (
    allocator_snapshot,
    record_allocations,
    stop_recording,
)
from torchmuster.train.world import World

_WIDTH = 1024
_LAYERS = 8
_BATCHES = (64, 200, 96, 512, 31)  # sizes that fragment memory


def train(world: World, request: Request) -> dict[str, Any]:
    """Train some steps with batches of several sizes; return the allocator's setting, its peak and what it did."""
    del request
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    record_allocations()
    try:
        _train_steps(world.device)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved()
        found = allocator_snapshot()
    finally:
        stop_recording()
    actions = found["device_traces"][torch.cuda.current_device()]
    return {
        "expandable_segments": found["allocator_settings"].get("expandable_segments"),
        "reserved_before": before,
        "max_reserved": peak,
        "history": [
            [one["action"], one["addr"], one["size"], one["stream"]]
            for one in actions
            if one["action"] in ("alloc", "free_completed")
        ],
    }


def _train_steps(device: torch.device) -> None:
    layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(_LAYERS)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for size in _BATCHES:
        loss = model(torch.randn(size, _WIDTH, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    answer_request({"train": train})
