"""The tests of the lab lost-node: pytest tests/, or muster lab check."""

import hashlib
import os
import signal
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from torchmuster.labs.testing import (
    Submission,
    compare,
    exercise,
    is_close,
    mistake,
    require,
    without,
)


@exercise
def test_latest_good(submission: Submission) -> None:
    """Step 10 is newer than step 9; partial files do not count; an empty folder gives None."""
    for number in (2, 9, 10):
        _save(submission.folder, number)
    found = submission.code.latest_good(submission.folder)
    as_text = "from steps 2, 9 and 10 it chose step-9"
    require(found is not None, "wrong-value", "from steps 2, 9 and 10 it chose none")
    require(found.name != "step-9.pt", "sorted-as-text", as_text)
    require(found.name == "step-10.pt", "wrong-value", f"it chose {found.name}")
    (submission.folder / "step-10.pt").write_bytes(b"half of")
    found = submission.code.latest_good(submission.folder)
    seen = "step-10.pt is truncated, and was chosen"
    require(found is not None and found.name != "step-10.pt", "not-verified", seen)
    require(found.name == "step-9.pt", "wrong-value", f"it chose {found.name}")
    (submission.folder / "step-11.pt").write_bytes(b"still being written")
    with without("hash-not-there", OSError):
        found = submission.code.latest_good(submission.folder)
    require(found.name == "step-9.pt", "not-verified", f"without its hash, {found.name} was chosen")
    empty = submission.folder / "empty"
    empty.mkdir()
    with without("no-checkpoint-crashes", IndexError, ValueError):
        found = submission.code.latest_good(empty)
    require(found is None, "wrong-value", f"in an empty folder it chose {found}")


def _save(folder: Path, number: int) -> None:
    content = f"checkpoint {number}".encode()
    (folder / f"step-{number}.pt").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    (folder / f"step-{number}.sha256").write_text(digest + "\n")


@exercise
def test_remaining(submission: Submission) -> None:
    """Three ranks before, two after: every sample once."""
    samples, before, after = 30, 3, 2
    first = [submission.code.remaining(samples, 1, 0, 0, rank, before) for rank in range(before)]
    require(sorted(chain(*first)) == list(range(samples)), "wrong-value", "an epoch on 3 ranks")
    seen: set[int] = set()
    for part in first:
        seen.update(part[:4])  # four per rank, then a machine is lost
    later = [submission.code.remaining(samples, 1, 0, 12, rank, after) for rank in range(after)]
    rest = list(chain(*later))
    require(len(rest) < samples, "starts-again", f"after 12 of {samples}, {len(rest)} are left")
    skipped = f"after 12 of {samples}, only {len(rest)} are left for two ranks"
    require(len(rest) == samples - 12, "done-by-each-rank", skipped)
    again = seen & set(rest)
    depends = f"{len(again)} samples are seen twice after the number of ranks changed"
    require(not again, "order-depends-on-ranks", depends)
    other = submission.code.remaining(samples, 1, 1, 0, 0, 1)
    whole = submission.code.remaining(samples, 1, 0, 0, 0, 1)
    require(other != whole, "same-order-each-epoch", "epochs 0 and 1 have the same order")


def _training(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _go_on(model, optimizer, steps)
    return model, optimizer


def _go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).pow(2).mean().backward()
        optimizer.step()


@exercise
def test_resume(submission: Submission) -> None:
    """Six steps with and without an interruption give the same result."""
    whole = _training(6)[0]
    path = submission.folder / "state.pt"
    model, optimizer = _training(3)
    submission.code.save_all(path, model, optimizer, 2)
    torch.manual_seed(99)  # a new process has another random state
    other = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    fresh = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    step = submission.code.restore_all(path, other, fresh)
    same = all(is_close(*pair) for pair in zip(other.parameters(), model.parameters(), strict=True))
    require(same, "wrong-value", "the weights differ from the saved ones")
    compare(step, 3, "restore_all of what was saved after step 2")
    require(bool(fresh.state), "momentum-lost", "the optimizer has no state after restore_all")
    _go_on(other, fresh, 3)
    same = all(is_close(*pair) for pair in zip(other.parameters(), whole.parameters(), strict=True))
    require(same, "random-numbers-lost", "dropout differs from the run without interruption")


@exercise
def test_stopping(submission: Submission) -> None:
    """Rank 0 gets SIGTERM during step 2; both ranks stop after it."""
    stop = submission.code.StopRequest()
    stop.install()
    handler = signal.getsignal(signal.SIGTERM)
    require(callable(handler), "signal-not-caught", "SIGTERM still kills the process immediately")
    ended_after = -1
    for step in range(5):
        if submission.rank == 0 and step == 2:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except SystemExit:
                mistake("ends-in-handler", "SystemExit was raised in the middle of a step")
        if stop.agreed():
            ended_after = step
            break
    submission.post(f"ended-{submission.rank}", str(ended_after))
    both = [int(submission.wait_for(f"ended-{rank}")) for rank in (0, 1)]
    seen = f"rank 0 stopped after step {both[0]}, rank 1 after step {both[1]} (-1: never)"
    require(both[0] == both[1], "stopped-alone", seen)
    require(both[0] == 2, "wrong-value", seen)
    dist.barrier()


@exercise
def test_interval(submission: Submission) -> None:
    """Young's rule, in steps."""
    given = submission.code.steps_between_saves(0.5, 10.0, 5.0)
    # sqrt(2 x 10 s x 18000 s) = 600 s
    known = {"seconds-not-steps": 600, "hours-not-seconds": 20}
    compare(given, 1200, "steps_between_saves(0.5, 10.0, 5.0)", known)
    compare(submission.code.steps_between_saves(1000.0, 0.001, 1.0), 1, "with steps of 1000 s, it")
