"""The tests of the lab ddp: pytest tests/, or muster lab check."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

from torchmuster.labs.testing import (
    Mistake,
    Submission,
    compare,
    exercise,
    is_close,
    of_all_ranks,
    require,
    watched,
)

# Ten samples on two ranks in batches of two: the last batch of each rank has one.
_SAMPLES, _BATCH, _EPOCHS, _RATE = 10, 2, 2, 0.1


@exercise
def test_dataloader(submission: Submission) -> None:
    """Each rank gets its own part, in random order."""
    dataset = TensorDataset(torch.arange(16.0))
    try:
        loaders = [
            submission.code.create_distributed_dataloader(dataset, 4, rank, 2) for rank in (0, 1)
        ]
    except ValueError as error:
        if "mutually exclusive" in str(error):
            raise Mistake("shuffle-and-sampler", str(error)) from None
        raise
    given = [torch.cat([batch for (batch,) in loader]).tolist() for loader in loaders]
    both = set(given[0]) & set(given[1])
    require(not both, "no-sampler", f"both ranks got sample {min(both, default=0)}")
    compare(sorted(given[0] + given[1]), list(range(16)), "all samples of both ranks together")
    require(given[0] != sorted(given[0]), "no-shuffle", f"rank 0 got {given[0]}")
    sizes = [len(batch) for (batch,) in loaders[0]]
    compare(sizes, [4, 4], "the sizes of rank 0's batches")


@exercise
def test_reduce_mean(submission: Submission) -> None:
    """The mean on every rank, without changing the tensor."""
    value = torch.tensor([1.0, 10.0]) * (1 + 2 * submission.rank)  # 1, 10 and 3, 30
    mean = submission.code.reduce_mean(value)
    what = "reduce_mean of [1, 10] and [3, 30]"
    compare(mean, [2.0, 20.0], what, {"sum-not-mean": [4.0, 40.0]})
    unchanged = is_close(value, [1.0 + 2 * submission.rank, 10.0 + 20 * submission.rank])
    require(unchanged, "changes-its-argument", f"the caller's tensor is now {value.tolist()}")


@exercise
def test_sync_gradients(submission: Submission) -> None:
    """Means of gradients, including with a parameter that has no gradient."""
    model = nn.Linear(2, 1)
    model.register_parameter("unused", nn.Parameter(torch.ones(1)))
    model.weight.grad = torch.full((1, 2), 1.0 + 2 * submission.rank)
    model.bias.grad = torch.full((1,), 4.0 * submission.rank)
    try:
        submission.code.sync_gradients(model)
    except (AttributeError, TypeError, ValueError) as error:
        if "None" in str(error) or "NoneType" in str(error):
            raise Mistake("none-gradient", str(error).partition("\n")[0]) from None
        raise
    summed = {"gradients-summed": [[4.0, 4.0]]}
    compare(model.weight.grad, [[2.0, 2.0]], "the gradient of 1 and 3", summed)
    compare(model.bias.grad, [2.0], "the gradient of 0 and 4")


@exercise
def test_train_epoch(submission: Submission) -> None:
    """Two epochs give the weights and losses of one process with all batches."""
    _check_device_ids(submission)
    trainer, optimizer, loader = _trainer(submission)
    with (
        watched(DistributedSampler, "set_epoch") as set_epochs,
        watched(torch.Tensor, "to") as moves,
    ):
        losses = [
            trainer.train_epoch(loader, optimizer, nn.MSELoss(reduction="mean"))
            for _ in range(_EPOCHS)
        ]
    own = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    weights = of_all_ranks(own)
    require(is_close(*weights), "not-wrapped", f"rank 0 {weights[0]}, rank 1 {weights[1]}")
    epochs = [
        arguments[1] if len(arguments) > 1 else named.get("epoch")
        for arguments, named in set_epochs
    ]
    same_order = is_close(own, _reference(orders=(0, 0))[0])
    require(bool(epochs) and not same_order, "no-set-epoch", f"set_epoch was called with {epochs}")
    seen = f"{len(moves)} calls of .to() for {len(loader) * _EPOCHS} batches"
    require(len(moves) >= len(loader) * _EPOCHS, "batches-not-moved", seen)
    piled = _reference(orders=(0, 1), zero_grad=False)[0]
    expected, by_sample, by_batch = _reference(orders=(0, 1))
    compare(own, expected, "the weights after two epochs", {"no-zero-grad": piled})
    both = of_all_ranks(losses)
    require(is_close(*both), "loss-of-one-rank", f"rank 0 {both[0]}, rank 1 {both[1]}")
    what = "the mean losses of two epochs"
    compare(losses, by_sample, what, {"batches-not-weighted": by_batch})


class _ModelOnGpu(nn.Linear):
    """A model that seems to be on the second GPU of this machine."""

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """Yield stand-ins of parameters."""
        yield SimpleNamespace(device=torch.device("cuda", 1))


def _check_device_ids(submission: Submission) -> None:
    given: list[Any] = []

    def wrap(model: nn.Module, device_ids: Any = None, **_: Any) -> nn.Module:
        given.append(device_ids)
        return model

    with submission.code.replaced("DistributedDataParallel", wrap):
        submission.code.DDPTrainer(_ModelOnGpu(2, 1), submission.rank, submission.world_size)
    require(bool(given), "not-wrapped", "DistributedDataParallel was not called")
    names = [
        str(torch.device("cuda", device) if device == 1 else device) for device in given[0] or ()
    ]
    require(names == ["cuda:1"], "no-device-ids", f"for a model on cuda:1, device_ids={given[0]}")


@exercise
def test_save_checkpoint(submission: Submission) -> None:
    """One file with clean names, complete before any rank continues."""
    trainer, optimizer, _ = _trainer(submission, momentum=0.9)
    _train_step(trainer, optimizer)
    path = submission.folder / "checkpoint.pt"

    def slowly(*_: Any, **__: Any) -> None:
        require(submission.rank == 0, "every-rank-saves", "rank 1 wrote as well")
        while not (submission.folder / "rank-1-is-here").exists():
            time.sleep(0.005)
        time.sleep(0.3)

    if submission.rank == 1:
        (submission.folder / "rank-1-is-here").touch()
    with watched(torch, "save", before=slowly):
        trainer.save_checkpoint(str(path), 4, optimizer)
    require(path.exists(), "no-barrier", f"rank {submission.rank} found no file when it continued")
    state = torch.load(path, weights_only=True)
    require(isinstance(state, dict) and "model" in state, "wrong-value", f"saved: {list(state)}")
    names = list(state["model"])
    require(not names[0].startswith("module."), "saved-wrapper", f"the first name is {names[0]}")
    has_state = bool(state.get("optimizer", {}).get("state"))
    require(has_state, "no-optimizer-state", f"saved: {', '.join(state)}")
    compare(state.get("epoch", -1), 4, "the saved epoch")
    dist.barrier()


@exercise
def test_load_checkpoint(submission: Submission) -> None:
    """Weights and optimizer as they were saved, on every rank."""
    trainer, optimizer, _ = _trainer(submission, momentum=0.9)
    inner = nn.Linear(2, 1)
    other = torch.optim.SGD(inner.parameters(), lr=0.5, momentum=0.9)
    inner(torch.ones(1, 2)).sum().backward()
    other.step()
    path = submission.folder / "checkpoint.pt"
    if submission.rank == 0:
        saved = {"model": inner.state_dict(), "optimizer": other.state_dict(), "epoch": 7}
        torch.save(saved, path)
    dist.barrier()
    with watched(torch, "load") as loads:
        epoch = trainer.load_checkpoint(str(path), optimizer)
    unsafe = any(named.get("weights_only") is False for _, named in loads)
    require(not unsafe, "unsafe-load", "torch.load(…, weights_only=False)")
    both = of_all_ranks(is_close(trainer.model.module.weight, inner.weight))
    require(both[0] == both[1], "loaded-on-one-rank", f"restored on rank 0, rank 1: {both}")
    compare(trainer.model.module.weight, inner.weight, "the loaded weights")
    rate = optimizer.param_groups[0]["lr"]
    require(rate == 0.5 and bool(optimizer.state), "optimizer-not-loaded", f"the rate is {rate}")
    compare(epoch, 7, "load_checkpoint")


def _trainer(
    submission: Submission, momentum: float = 0.0
) -> tuple[Any, torch.optim.Optimizer, Any]:
    model = nn.Linear(2, 1)  # different on rank 1 on purpose: DDP broadcasts that of rank 0
    with torch.no_grad():
        model.weight.fill_(0.5 + submission.rank)
        model.bias.zero_()
    trainer = submission.code.DDPTrainer(model, submission.rank, submission.world_size)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=_RATE, momentum=momentum)
    sampler: DistributedSampler[Any] = DistributedSampler(_dataset(), 2, submission.rank)
    loader = torch.utils.data.DataLoader(_dataset(), batch_size=_BATCH, sampler=sampler)
    return trainer, optimizer, loader


def _train_step(trainer: Any, optimizer: torch.optim.Optimizer) -> None:
    trainer.model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def _dataset() -> TensorDataset:
    inputs = torch.randn(_SAMPLES, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 0.3)


def _batches(order: int) -> Iterator[list[list[int]]]:
    """Yield the batches of all ranks for each step of an epoch."""
    parts = []
    for rank in (0, 1):
        sampler: DistributedSampler[Any] = DistributedSampler(_dataset(), 2, rank)
        sampler.set_epoch(order)
        parts.append(list(sampler))
    for begin in range(0, _SAMPLES // 2, _BATCH):
        yield [part[begin : begin + _BATCH] for part in parts]


def _reference(
    *, orders: tuple[int, ...], zero_grad: bool = True
) -> tuple[torch.Tensor, list[float], list[float]]:
    """Train in one process like two ranks; return weights, losses by sample, losses by batch."""
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    inputs, targets = _dataset().tensors
    by_sample, by_batch = [], []
    for order in orders:
        weighted_losses: list[tuple[float, int]] = []
        for parts in _batches(order):
            if zero_grad:
                optimizer.zero_grad()
            losses = [nn.functional.mse_loss(model(inputs[part]), targets[part]) for part in parts]
            (sum(losses[1:], losses[0]) / 2).backward()
            optimizer.step()
            weighted_losses += [
                (float(loss), len(part)) for loss, part in zip(losses, parts, strict=True)
            ]
        by_sample.append(sum(loss * count for loss, count in weighted_losses) / _SAMPLES)
        by_batch.append(sum(loss for loss, _ in weighted_losses) / len(weighted_losses))
    return (
        torch.cat([parameter.detach().flatten() for parameter in model.parameters()]),
        by_sample,
        by_batch,
    )
