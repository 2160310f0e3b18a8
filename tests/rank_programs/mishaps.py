"""Bad numbers of every kind on one rank."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rank_programs.small_models import Layers, portion, seeded_model, step_of, strategy_of
from rank_programs.updating import flat_weights
from torchmuster.errors import MusterError
from torchmuster.finding import Finding
from torchmuster.train.bad_numbers import BadNumbers
from torchmuster.train.data.step import MicroBatch
from torchmuster.train.step import TrainStep
from torchmuster.train.world import World, all_gather_object

Loss = Callable[[nn.Module, Any], torch.Tensor]


def squared_error(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


class _Recorder(nn.Module):
    """Has a buffer that every forward changes, as BatchNorm's statistics are."""

    def __init__(self, inner: Layers) -> None:
        super().__init__()
        self.inner = inner
        self.dropout = nn.Dropout(0.1)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return torch.as_tensor(self.inner(self.dropout(inputs)))


def every_cause(world: World, name: str) -> dict[str, dict[str, str]]:
    """Spoil rank 1's numbers in every way; return each finding, told alike by all ranks."""
    cases: dict[str, Callable[[World, str], Finding]] = {
        "input": _bad_input,
        "layer": _bad_layer,
        "loss": _bad_loss,
        "gradient": _bad_gradient,
        "weights": _bad_weights,
        "nothing": _gone_again,
    }
    findings = {}
    for case, make in cases.items():
        own = make(world, name).as_json()
        said = all_gather_object(own, world)
        assert all(one == own for one in said), said
        findings[case] = own
    return findings


def _bad_input(world: World, name: str) -> Finding:
    micro_batches = portion(8, world, rounds=2)
    if world.global_rank == 1:
        micro_batches[1].batch[0][0, 3] = float("nan")
    return _one_bad_step(world, name, micro_batches, squared_error)


def _bad_layer(world: World, name: str) -> Finding:
    def spoil(model: Layers) -> None:
        def divide_by_zero(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return (output - output) / 0.0 if world.global_rank == 1 else output

        model.layers[1].register_forward_hook(divide_by_zero)

    return _one_bad_step(world, name, portion(8, world), squared_error, spoil)


def _bad_loss(world: World, name: str) -> Finding:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        zero_on_rank_1 = 0.0 if world.global_rank == 1 else 1.0
        return squared_error(model, batch) * torch.log(torch.tensor(zero_on_rank_1))

    return _one_bad_step(world, name, portion(8, world), loss)


def _bad_gradient(world: World, name: str) -> Finding:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        error = squared_error(model, batch)
        return error + torch.sqrt(error * 0.0) if world.global_rank == 1 else error

    return _one_bad_step(world, name, portion(8, world), loss)


def _bad_weights(world: World, name: str) -> Finding:
    def spoil(model: Layers) -> None:
        with torch.no_grad():
            model.get_parameter("layers.0.weight")[7, 7] = float("inf")

    return _one_bad_step(world, name, portion(8, world), squared_error, spoil)


def _gone_again(world: World, name: str) -> Finding:
    calls = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        bad = calls == 1 and world.global_rank == 1
        return squared_error(model, batch) * (float("nan") if bad else 1.0)

    return _one_bad_step(world, name, portion(8, world), loss)


def _one_bad_step(
    world: World,
    name: str,
    micro_batches: list[MicroBatch],
    loss_fn: Loss,
    spoil: Callable[[Layers], None] | None = None,
) -> Finding:
    """Take the step, see that it changes nothing, and that looking for the cause changes nothing either."""
    model, update = _recorder(world, name, spoil)
    before = flat_weights(model)
    for micro in update.accumulate(step_of(micro_batches, 8, number=3)):
        update.backward(loss_fn(model, micro.batch))
    outcome = update.apply()
    assert not outcome.applied
    buffers, random_state = [one.clone() for one in model.buffers()], torch.get_rng_state()
    found = BadNumbers(model, world).examine(41, outcome.micro_batches, loss_fn, epoch=2)
    assert str(flat_weights(model)) == str(before)
    assert all(torch.equal(*pair) for pair in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(one.grad is None for one in model.parameters())
    if spoil is None:  # a good step must now be as if nothing had been
        undisturbed, first_update = _recorder(world, name)
        _good_step(update, model, world)
        _good_step(first_update, undisturbed, world)
        assert flat_weights(model) == flat_weights(undisturbed)
    return found


def _recorder(
    world: World, name: str, spoil: Callable[[Layers], None] | None = None
) -> tuple[nn.Module, TrainStep]:
    strategy = strategy_of(name, world)
    inner = seeded_model()
    if spoil is not None:
        spoil(inner)
    model = strategy.prepare(_Recorder(inner))
    return model, TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, world)


def _good_step(update: TrainStep, model: nn.Module, world: World) -> None:
    torch.manual_seed(world.global_rank)
    for micro in update.accumulate(step_of(portion(8, world), 8)):
        update.backward(squared_error(model, micro.batch))
    assert update.apply().applied


def many_in_a_row(world: World) -> list[str]:
    """Skip two bad steps, then have a good one, then three bad ones with at most two in a row allowed."""
    strategy = strategy_of("ddp", world)
    model = strategy.prepare(seeded_model())
    bad_numbers = BadNumbers(model, world, most_in_a_row=3)
    said = []
    spoilt = portion(4, world)
    if world.global_rank == 1:
        spoilt[0].batch[1][0] = float("inf")
    for number in (0, 1, 3, 4, 5):
        try:
            said.append(bad_numbers.examine(number, spoilt, squared_error).what)
        except MusterError as error:
            said.append(str(error))
    try:
        BadNumbers(model, world, most_in_a_row=1).examine(0, spoilt, squared_error)
    except MusterError as error:
        said.append(error.what)
    return said
