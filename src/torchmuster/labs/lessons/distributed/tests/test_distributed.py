"""The tests of the lab distributed: pytest tests/, or muster lab check."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from torchmuster.labs.testing import (
    Submission,
    compare,
    exercise,
    is_close,
    of_all_ranks,
    replaced,
    require,
    watched,
    without,
)


@exercise
def test_prepare(submission: Submission) -> None:
    """Equal initial weights, different noise per rank, reproducible."""
    noises = []
    for _ in range(2):
        model = nn.Linear(3, 1)
        with torch.no_grad():
            model.weight.fill_(1.0 + submission.rank)
        wrapped = submission.code.prepare(model, 5)
        noises.append(torch.rand(3))
    weights = of_all_ranks(next(iter(wrapped.parameters())).detach())
    require(is_close(*weights), "copies-differ", f"rank 0 {weights[0]}, rank 1 {weights[1]}")
    noise = of_all_ranks(noises[0])
    require(not is_close(*noise), "same-noise-everywhere", f"both ranks drew {noise[0].tolist()}")
    again = is_close(*noises)
    require(again, "noise-not-reproducible", "the same seed gave different numbers the second time")


class _Guess(nn.Module):
    """A model that predicts its input, and records the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.trained = self.with_gradients = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.trained = self.trained or self.training
        self.with_gradients = self.with_gradients or torch.is_grad_enabled()
        return inputs * self.scale


@exercise
def test_evaluate(submission: Submission) -> None:
    """Seven samples on two ranks: each once."""
    right = torch.tensor([1, 0, 1, 0, 1, 1, 0])
    dataset = TensorDataset(torch.eye(2)[right], torch.ones(7, dtype=torch.long))
    model = _Guess()
    share = submission.code.evaluate(model, dataset, 2)
    require(not model.trained, "evaluated-in-training-mode", "model.training is True in forward")
    require(not model.with_gradients, "evaluation-keeps-graphs", "gradients were enabled")
    require(model.training, "left-in-eval-mode", "model.training is False afterwards")
    known = {"padded-duplicates": 5 / 8, "accuracy-averaged": (3 / 4 + 1 / 3) / 2}
    compare(share, 4 / 7, "evaluate, with 3 of 4 right on rank 0 and 1 of 3 on rank 1,", known)


@exercise
def test_scaling(submission: Submission) -> None:
    """Speed-up, efficiency, and the share of communication."""
    rows = submission.code.scaling_table({1: 100.0, 2: 62.5, 4: 40.0})
    require(len(rows) == 3, "wrong-value", f"there are {len(rows)} rows for 3 numbers of ranks")
    by_ranks = {row.ranks: row for row in rows}
    what = "the speed-up from 100 s to 40 s"
    compare(by_ranks[4].speedup, 2.5, what, {"speedup-inverted": 0.4})
    what = "the efficiency of 4 ranks that are 2.5x as fast"
    compare(by_ranks[4].efficiency, 0.625, what, {"efficiency-is-speedup": 2.5})
    compare(by_ranks[1].efficiency, 1.0, "the efficiency of one rank")
    share = submission.code.communication_share(0.010, 0.008)
    what = "communication_share of 10 ms, 8 of them without,"
    compare(share, 0.2, what, {"share-of-the-wrong-whole": 0.25})


@exercise
def test_accumulate(submission: Submission) -> None:
    """Four micro-batches give the step of one batch, and one message."""
    model = nn.Linear(2, 1)
    inputs = torch.randn(2, 32, 2, generator=torch.Generator().manual_seed(3))
    targets = inputs.sum(2, keepdim=True)
    criterion = nn.MSELoss()
    whole = criterion(model(inputs.reshape(64, 2)), targets.reshape(64, 1))
    (gradient,) = torch.autograd.grad(whole, [model.weight])
    expected = model.weight.detach() - 0.1 * gradient
    too_far = model.weight.detach() - 0.1 * gradient * 4

    sent = [0]
    wrapped = DistributedDataParallel(model)

    def count(
        state: Any,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP looks at the annotation
    ) -> torch.futures.Future[torch.Tensor]:
        sent[0] += 1
        return allreduce_hook(state, bucket)

    wrapped.register_comm_hook(None, count)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    parts = list(
        zip(inputs[submission.rank].split(8), targets[submission.rank].split(8), strict=True)
    )
    with watched(optimizer, "step") as steps:
        submission.code.accumulate(wrapped, parts, criterion, optimizer)
    require(len(steps) == 1, "step-each-micro-batch", f"optimizer.step ran {len(steps)} times")
    require(sent[0] > 0, "never-synced", "no gradient was sent")
    require(
        sent[0] == 1, "sync-every-micro-batch", f"gradients were sent {sent[0]} times, not once"
    )
    what = "the weights after 4 x 8 samples on 2 ranks"
    compare(model.weight, expected, what, {"loss-not-divided": too_far})


@exercise
def test_checkpoint(submission: Submission) -> None:
    """A crash leaves the old file; a resume continues after the saved step, or at 0."""
    path = submission.folder / "checkpoint.pt"
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with without("no-first-start", FileNotFoundError):
        first = submission.code.resume(str(path), model, optimizer)
    compare(first, 0, "resume without a file")
    dist.barrier()  # otherwise one rank saves before the other has checked
    submission.code.save(str(path), model, optimizer, 7)
    weight = model.module.weight.detach().clone()
    with torch.no_grad():
        model.module.weight.add_(1.0)
    dist.barrier()

    def crash(_: Any, file: Any, *__: Any, **___: Any) -> None:
        Path(file).write_bytes(b"half of a")
        raise OSError("No space left on device")

    nobody_waits = replaced(dist, "barrier", lambda *_, **__: None)
    with replaced(torch, "save", crash), nobody_waits, suppress(OSError):
        submission.code.save(str(path), model, optimizer, 8)
    dist.barrier()
    with without("not-atomic", Exception):  # the disk was full at the second save
        torch.load(path, weights_only=True)
    step = submission.code.resume(str(path), model, optimizer)
    compare(model.module.weight, weight, "the loaded weights")
    compare(step, 8, "resume from a file saved after step 7", {"resume-repeats-step": 7})
