"""Training on ranks is equal to one plain PyTorch process with the whole batch, within 1e-6.

The plain process is written out here and uses nothing of the product.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rank_group import RunRanks
from rank_programs import parity
from rank_programs.parity import Batch, Case

pytestmark = pytest.mark.ranks

TOLERANCE = 1e-6
CLIP = 0.4  # low enough to clip every step
LAYOUTS = {
    1: ["ddp", "fsdp", "hybrid"],
    2: ["ddp", "fsdp", "hybrid of 1", "hybrid of 2"],
    3: ["ddp", "fsdp", "hybrid of 1"],
    4: ["ddp", "fsdp", "hybrid of 2"],
}


def _cases(ranks: int) -> list[Case]:
    matrix = [
        Case(strategy=strategy, rounds=rounds, counts=counts, clip_norm=clip_norm)
        for strategy, rounds, counts, clip_norm in itertools.product(
            LAYOUTS[ranks], (1, 3), ("equal", "variable"), (None, CLIP)
        )
    ]
    unequal_samples = [
        Case(strategy=strategy, rounds=3, counts="samples", clip_norm=None)
        for strategy in LAYOUTS[ranks]
    ]
    more_ways = [
        Case(strategy=strategy, rounds=3, counts="variable", clip_norm=CLIP)
        for strategy in ("shard_grad_op", "offload")
    ]
    return matrix + unequal_samples + (more_ways if ranks in (2, 3) else [])


@functools.cache
def _plain(case: Case, ranks: int) -> dict[str, Any]:
    """Train in one process, on the whole batch at once, in plain PyTorch."""
    model = parity.language_model(100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for number in range(parity.STEPS):
        words, labels = _whole(parity.global_batch(case, ranks, number))
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        if case.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
            assert norm > case.clip_norm, "or clipping is not tried"
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([one.detach().flatten() for one in model.parameters()])
    return {"losses": losses, "gradient": _gradient(model), "weights": weights}


def _gradient(model: nn.Module) -> torch.Tensor:
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    return torch.cat([one.flatten() for one in gradients])


def _whole(batches: list[Batch]) -> Batch:
    return torch.cat([words for words, _ in batches]), torch.cat([labels for _, labels in batches])


def _error(seen: Any, right: Any) -> float:
    """How far off, in parts of how large it is."""
    seen, right = torch.as_tensor(seen).double(), torch.as_tensor(right).double()
    return float((seen - right).norm() / right.norm())


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(1, marks=pytest.mark.nightly), 2, 3, pytest.param(4, marks=pytest.mark.nightly)],
)
def test_gradients_losses_and_weights_are_those_of_one_plain_process(
    run_ranks: RunRanks, ranks: int
) -> None:
    cases = _cases(ranks)
    answers = run_ranks(parity.train, ranks, cases)
    wrong = {}
    for case, *own in zip(cases, *answers, strict=True):
        plain = _plain(replace(case, strategy="plain"), ranks)
        errors = {name: _error(own[0][name], right) for name, right in plain.items()}
        if max(errors.values()) > TOLERANCE:
            wrong[case] = errors
        assert len({one["checksum"] for one in own}) == 1, f"ranks differ: {case}"
        assert all(one["tied"] for one in own), f"weights are no longer tied: {case}"
    assert wrong == {}


def test_four_micro_batches_of_8_are_one_of_32(run_ranks: RunRanks) -> None:
    cases = [
        Case(strategy=strategy, rounds=rounds, counts="equal", clip_norm=None, micro_batch_size=own)
        for strategy in ("ddp", "fsdp")
        for rounds, own in ((4, 4), (1, 16))
    ]
    first = run_ranks(parity.train, 2, cases)[0]
    plain = _plain(replace(cases[1], strategy="plain"), 2)
    for case, answer in zip(cases, first, strict=True):
        assert _error(answer["weights"], plain["weights"]) < TOLERANCE, case
        assert _error(answer["losses"], plain["losses"]) < TOLERANCE, case


def test_only_the_count_of_all_ranks_gives_the_gradient_of_the_whole_batch(
    run_ranks: RunRanks,
) -> None:
    """A mean of means, and tokens counted by each rank, are what people write; both are wrong."""
    ranks, case = 2, Case(strategy="ddp", rounds=3, counts="variable", clip_norm=None)
    batches = parity.global_batch(case, ranks, number=0)
    right = _gradient_of([_whole(batches)], lambda one: _tokens([one]))

    mean_of_means = _gradient_of(batches, lambda one: max(_tokens([one]), 1) * len(batches))
    per_rank = [
        _gradient_of(own, lambda _, own=own: _tokens(own))  # type: ignore[misc]
        for own in (batches[rank::ranks] for rank in range(ranks))
    ]
    errors = {
        "mean of means": _error(mean_of_means, right),
        "tokens of each rank": _error(sum(per_rank) / ranks, right),
        "tokens of all ranks": _error(run_ranks(parity.first_gradient, ranks, case)[0], right),
    }
    assert errors["mean of means"] > 0.01
    assert errors["tokens of each rank"] > 0.01
    assert errors["tokens of all ranks"] < TOLERANCE


def _gradient_of(batches: list[Batch], per: Callable[[Batch], float]) -> torch.Tensor:
    """The gradient of the sum of all losses, each divided by what ``per`` says."""
    model = parity.language_model(100)
    for one in batches:
        torch.autograd.backward(parity.token_losses(model, one).sum() / per(one))
    return _gradient(model)


def _tokens(batches: list[Batch]) -> int:
    return sum(int((labels != -100).sum()) for _, labels in batches)
