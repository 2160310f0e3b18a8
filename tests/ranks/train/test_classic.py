"""The classic trainers on real ranks: equal to one plain process, and without their pitfalls."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rank_group import RunRanks
from rank_programs import classic
from torchmuster.train.data.order import sample_order

pytestmark = pytest.mark.ranks


def plain(
    samples: int, whole_batch: int, epochs: int, name: str
) -> tuple[list[float], list[float]]:
    """Train in one process on whole batches, with nothing of the trainers."""
    points, targets = classic.dataset(samples).tensors
    criterion = classic.CRITERIA[name]()
    model = classic.OneColumn(classic.network()) if name == "sum" else classic.network()
    targets = targets.float() if name == "sum" else targets
    optimizer = classic.adam(model)
    means = []
    for epoch in range(epochs):
        order = sample_order(samples, seed=0, epoch=epoch)
        total = counted = 0.0
        for chosen in torch.split(order, whole_batch):
            loss = criterion(model(points[chosen]), targets[chosen])
            count = float(len(chosen))
            if name == "sum":
                loss = loss / count
            elif name == "ignoring":
                count = float((targets[chosen] != 0).sum())
            elif name == "cross entropy":
                count = float(criterion.weight[targets[chosen]].sum())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, counted = total + loss.item() * count, counted + count
        means.append(total / counted)
    return means, classic.weights(model)


@pytest.mark.parametrize(("ranks", "samples", "batch_size"), [(2, 19, 4), (3, 22, 3)])
def test_an_epoch_is_that_of_one_process_with_unequal_last_batches(
    run_ranks: RunRanks, ranks: int, samples: int, batch_size: int
) -> None:
    answers = run_ranks(classic.train, ranks, samples, batch_size, 2)
    for name in classic.CRITERIA:
        losses, weights = plain(samples, ranks * batch_size, 2, name)
        for answer in answers:
            assert answer[name][0] == pytest.approx(losses, abs=1e-6), name
            assert answer[name][1] == pytest.approx(weights, abs=2e-6), name
        assert answers[0] == answers[-1]


def test_a_checkpoint_of_two_ranks_goes_on_on_one_and_three(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    (saved, went_on), other = run_ranks(classic.train_and_save, 2, str(tmp_path))
    assert other == (saved, went_on)
    for ranks in (1, 3):
        # 2 ranks x 2 samples are 4 in a step, as are 1 x 4; with 3 ranks the steps are others
        answers = run_ranks(classic.load_and_train, ranks, str(tmp_path), 4 if ranks == 1 else 2)
        for epoch, loaded, then in answers:
            assert (epoch, loaded) == (0, saved)
            assert then == answers[0][2]
            if ranks == 1:
                assert then == pytest.approx(went_on, abs=2e-6)


class Hostile:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_pitfalls_are_taken_away_or_named_on_every_rank(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    torch.save(Hostile(str(tmp_path / "executed")), tmp_path / "hostile.pt")
    answers = run_ranks(classic.pitfalls, 2, str(tmp_path / "hostile.pt"))
    assert not (tmp_path / "executed").exists()
    first, second = answers
    orders = [first["orders"][epoch] + second["orders"][epoch] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert sorted(orders[0]) == pytest.approx(sorted(orders[1]), abs=1e-6)
    assert first["epoch"] == 40
    assert "rank 1 has 4, rank 0 has 3" in first["uneven"]
    assert "not written by save_checkpoint" in first["hostile"]
    assert "/proc/nowhere" in first["unwritable"]
    assert "rank 0 of 3 was given" in first["contradiction"]
    assert "pickle" in first["unpicklable"]
    assert "(inputs, targets)" in first["no targets"]
    for name in ("uneven", "hostile", "unwritable", "unpicklable", "no targets"):
        assert second[name] == first[name]


def test_averages_by_hand_are_those_of_ddp(run_ranks: RunRanks) -> None:
    for answer in run_ranks(classic.averages, 3):
        assert answer["number"] == pytest.approx(0.1)
        assert answer["tensor"].tolist() == [1.0, 4.0]
        assert answer["tensor"].dtype == torch.bfloat16
        assert answer["counts"].tolist() == [1.0, 1.0]
        assert answer["counts"].dtype == torch.float32
        assert answer["graph"] is False
        for by_hand, by_ddp in zip(answer["gradients"], answer["of DDP"], strict=True):
            assert by_hand == pytest.approx(by_ddp, abs=1e-6)
        assert answer["gradients"][1] is None  # used nowhere: no optimizer may see it
        assert any(answer["gradients"][0])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_resumed_run_is_bit_by_bit_the_one_that_never_stopped(
    run_ranks: RunRanks, tmp_path: Path, precision: str
) -> None:
    whole = run_ranks(classic.produce, 2, str(tmp_path), precision, False)
    resumed = run_ranks(classic.produce, 2, str(tmp_path), precision, True)
    for (numbers, weights, state), (later, later_weights, later_state) in zip(
        whole, resumed, strict=True
    ):
        assert later == numbers[2:]
        assert later_weights == weights
        assert later_state == state
    numbers = whole[0][0]
    assert whole[0] == whole[1]
    assert all(0 <= one["accuracy"] <= 1 for _, _, one, _ in numbers)
    assert numbers[-1][2]["loss"] < numbers[0][2]["loss"]
    assert numbers[-1][3] == pytest.approx([0.0], abs=1e-9)  # the schedule ends with the last epoch
    assert list((tmp_path / "curves").glob("events.out.tfevents.*"))
    names = sorted(one.name for one in tmp_path.iterdir())
    assert names == ["curves", *(f"epoch-000{epoch}.pt" for epoch in range(4))]
