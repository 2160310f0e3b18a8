"""Reading on real ranks: different numbers of batches are named, and positions move between group sizes."""

from itertools import chain
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from rank_group import RunRanks
from rank_programs import reading
from rank_programs.small_models import data, seeded_model
from torchmuster.train.data.order import sample_order

pytestmark = pytest.mark.ranks


def test_different_numbers_of_batches_are_named_on_all_ranks_and_nothing_hangs(
    run_ranks: RunRanks, snapshot: SnapshotAssertion
) -> None:
    answers = run_ranks(reading.compare, 4, [13, 12, 12, 12])
    told = answers[0][0] or ""
    assert answers == [(told, 4)] * 4
    assert "rank 0 has 13, rank 1 has 12" in told
    assert told == snapshot


def together(answers: list[Any]) -> tuple[Any, list[list[int]]]:
    """Return the position, on which all ranks agree, and the samples of each global batch."""
    states, seen = zip(*answers, strict=True)
    assert all(state == states[0] for state in states)
    return states[0], [sorted(chain(*parts)) for parts in zip(*seen, strict=True)]


def test_two_ranks_stop_in_the_middle_and_three_go_on(run_ranks: RunRanks) -> None:
    _, uninterrupted = together(run_ranks(reading.indices_read, 1, None, None))
    state, first = together(run_ranks(reading.indices_read, 2, None, 2))
    assert (state["epoch"], state["sample"]) == (1, 24)
    _, rest = together(run_ranks(reading.indices_read, 3, state, None))
    assert first + rest == uninterrupted
    assert sorted(chain(*uninterrupted)) == list(range(50))


def plainly_trained(batches: list[list[int]]) -> list[float]:
    """Train in one process on the whole of each batch, with nothing of ours."""
    inputs, targets = data(17)
    model = seeded_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch])
        torch.autograd.backward(loss)
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).tolist()


def test_unlike_portions_train_as_one_process_does(run_ranks: RunRanks) -> None:
    orders = [sample_order(17, seed=2, epoch=epoch) for epoch in range(2)]
    shuffled = [batch.tolist() for order in orders for batch in (order[:12], order[12:])]
    in_order = [list(range(12)), list(range(12, 17))] * 2
    for kind, batches in (("batches", shuffled), ("foreign", in_order)):
        expected = plainly_trained(batches)
        for weights in run_ranks(reading.trained, 3, kind):
            assert weights == pytest.approx(expected, abs=1e-6)
