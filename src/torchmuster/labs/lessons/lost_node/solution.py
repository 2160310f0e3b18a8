"""Resume after a lost machine: last good checkpoint, right samples, any number of ranks."""

import hashlib
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def latest_good(folder: Path) -> Path | None:
    """Return the newest ``step-<n>.pt`` whose SHA-256 is in ``step-<n>.sha256``, or None.

    A machine that is lost during a save leaves a partial file, or a file without its hash.
    """
    # solution
    saved = sorted(folder.glob("step-*.pt"), key=lambda path: int(path.stem.partition("-")[2]))
    for path in reversed(saved):
        noted = path.with_suffix(".sha256")
        if noted.exists():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if digest == noted.read_text().strip():
                return path
    return None
    # end of solution


def remaining(
    samples: int, seed: int, epoch: int, done: int, rank: int, world_size: int
) -> list[int]:
    """Return this rank's remaining samples of an epoch of which all ranks have processed ``done``.

    The order of the epoch depends on seed and epoch only (``torch.randperm``), so that it is the same on any
    number of ranks; the rest is distributed one by one.
    """
    # solution
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(samples, generator=generator).tolist()
    return list(order[done:][rank::world_size])
    # end of solution


def save_all(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write everything that the next step depends on, including the random state."""
    # solution
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "step": step,
    }
    torch.save(state, path)
    # end of solution


def restore_all(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore everything; return the next step."""
    # solution
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    return int(state["step"]) + 1
    # end of solution


class StopRequest:
    """Handles SIGTERM, which a scheduler sends to a rank before it reclaims the machine."""

    def __init__(self) -> None:
        self.received = False

    def install(self) -> None:
        """Install a handler that only sets a flag: it may interrupt anything, even a save."""
        # solution
        signal.signal(signal.SIGTERM, self._note)
        # end of solution

    def _note(self, *_: Any) -> None:
        # solution
        self.received = True
        # end of solution

    def agreed(self) -> bool:
        """Return whether any rank got SIGTERM, the same on all ranks, which call it after each step."""
        # solution
        flag = torch.tensor([float(self.received)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())
        # end of solution


def steps_between_saves(step_s: float, save_s: float, hours_between_failures: float) -> int:
    """Return the number of steps between saves that minimizes saving time plus lost work.

    Young's rule: the time between saves is sqrt(2 x save time x time between failures). At least 1.
    """
    # solution
    between_s = (2 * save_s * hours_between_failures * 3600) ** 0.5
    return max(1, int(between_s / step_s + 0.5))
    # end of solution
