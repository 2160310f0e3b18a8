"""Trains one model in every precision from the same weights and data, with interleaved timing."""

import contextlib
import copy
import gc
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils.data import default_collate

from torchmuster.bench.precision import PrecisionAnswer, PrecisionRequest, PrecisionRun
from torchmuster.bench.probes import stability
from torchmuster.bench.probes.clock import device_name, interleaved, number_types
from torchmuster.errors import Impossible
from torchmuster.plan.job import Candidate
from torchmuster.plan.probes.build_step import BuiltStep, build_step
from torchmuster.plan.probes.live_storage import tensor_memory
from torchmuster.plan.proof.fresh_ranks import leave_answer
from torchmuster.train.bad_numbers import BadNumbers
from torchmuster.train.data.pytree import map_tensors, move_to_device, tensors_in
from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.models import factory
from torchmuster.train.precision import PRECISIONS
from torchmuster.train.step import StepResult, TrainStep
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.train.world import World, join_world

_FOLLOWED = 3  # steps whose memory is measured; the last one is like all later ones
_HELD = 2  # held-out batches
_STUDY_STEPS = 60
_NEVER = 10**9
_MOST_TRIES = 24  # of a step: after this many halvings, the initial loss scale is less than 1
_NUMBER_TYPES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}


def measure_precisions(request: PrecisionRequest, world: World) -> PrecisionAnswer:
    """Train in each precision, then time all of them interleaved."""
    names, missing = _precisions(world.device)
    samples = _samples(request)
    first = _built(request, "fp32", world)
    batches = _batches(request, first, samples)
    reference = _reference(first, batches[0])
    del first
    ways = []
    for name in names:
        try:
            ways.append(_Training(request, name, world, reference).way(batches))
        except Impossible as error:  # weights of 16 bits cannot be trained with a loss scale
            missing[name] = f"{error.what}: {error.why}"
    other_order = [*batches[:_HELD], *reversed(batches[_HELD:])]
    again = _Training(request, "fp32", world, reference).way(other_order)
    first = _built(request, "fp32", world)
    taken = _precision_times(request, first, [one.precision for one in ways], batches[0])
    return PrecisionAnswer(
        device=str(world.device),
        device_name=device_name(world.device),
        parameter_count=first.parameter_count,
        ways=tuple(replace(one, step_s=taken[one.precision]) for one in ways),
        missing=missing,
        other_order_loss=again.held_loss,
        courses=stability.study_stability(
            world, [one for one in names if one != "tf32"], _STUDY_STEPS
        )
        if request.study
        else (),
    )


def _precisions(device: torch.device) -> tuple[list[str], dict[str, str]]:
    """Return the precisions of a device, and why the others are left out."""
    types, missing = number_types(device)
    # CPUs can train in fp16 too, for comparison.
    there = {*types, "float16"} if device.type == "cpu" else set(types)
    return (
        [name for name, one in _NUMBER_TYPES.items() if one in there],
        {name: missing[one] for name, one in _NUMBER_TYPES.items() if one not in there},
    )


def _built(request: PrecisionRequest, name: str, world: World) -> BuiltStep:
    """Build the training with the weights from which every precision starts."""
    gc.collect()
    torch.manual_seed(0)
    one_rank = Candidate(
        strategy="single",
        layout=ShardLayout(copies=1, shards=1),
        precision="fp32" if name == "tf32" else name,  # type: ignore[arg-type]
        micro_batch_size=request.micro_batch_size,
    )
    return build_step(request.work, one_rank, world)


def _samples(request: PrecisionRequest) -> list[Any]:
    """Return as many samples of the dataset as needed, or all; none for random text."""
    if request.work.dataset is None:
        return []
    torch.manual_seed(0)
    with contextlib.chdir(request.work.folder):
        dataset = factory.call_import(request.work.dataset, "data.dataset")
    found = list(itertools.islice(dataset, (request.steps + _HELD) * request.micro_batch_size))
    if not found:
        raise Impossible(
            f"{request.work.dataset} (data.dataset) has no samples",
            why="there is nothing to train on",
            fix="return samples from that function",
        )
    return found


def _batches(request: PrecisionRequest, built: BuiltStep, samples: Sequence[Any]) -> list[Any]:
    """Return the held-out batches and one per step; a small dataset is repeated."""
    count, size = request.steps + _HELD, request.micro_batch_size
    torch.manual_seed(0)
    if not samples:
        return [built.batch() for _ in range(count)]
    endless = itertools.cycle(samples)
    return [default_collate([next(endless) for _ in range(size)]) for _ in range(count)]


def _reference(built: BuiltStep, batch: Any) -> torch.Tensor | None:
    """Return the initial outputs for one sample in float64; None if not supported."""
    exact = copy.deepcopy(built.model).to("cpu", torch.float64)
    try:
        return _outputs(built, exact, _on_cpu_as_float64(_first_sample(batch)))
    except RuntimeError:  # the model casts to its own dtype
        return None


def _first_sample(batch: Any) -> Any:
    return map_tensors(batch, lambda one: one[:1])


def _on_cpu_as_float64(batch: Any) -> Any:
    batch = move_to_device(batch, torch.device("cpu"))
    return map_tensors(batch, lambda one: one.double() if one.is_floating_point() else one)


def _outputs(built: BuiltStep, model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Return the first tensor that the model gives when its loss is computed, in float64 on the CPU."""
    seen: list[torch.Tensor] = []
    hook = model.register_forward_hook(
        lambda module, args, output: seen.append(next(tensors_in(output)))
    )
    model.eval()
    try:
        with torch.no_grad():
            built.loss(model, batch)
    finally:
        hook.remove()
        model.train()
    return seen[0].double().cpu()


@contextlib.contextmanager
def _arithmetic(name: str) -> Iterator[None]:
    """Enable or disable TF32 for float32 products on accelerators."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


class _Training:
    """A training run in one precision."""

    def __init__(
        self, request: PrecisionRequest, name: str, world: World, reference: torch.Tensor | None
    ) -> None:
        self._request = request
        self._name = name
        self._world = world
        self._reference = reference
        self._losses: list[float | None] = []
        self._skipped = 0
        self._trouble = ""

    def way(self, batches: Sequence[Any]) -> PrecisionRun:
        """Train, and return the result; the first batches are held out."""
        held, data = batches[:_HELD], batches[_HELD:]
        with _arithmetic(self._name):
            with tensor_memory(self._world.device) as look:
                begin = look().live_bytes
                built = _built(self._request, self._name, self._world)
                error = self._output_error(built, held[0])
                for number, batch in enumerate(data[:_FOLLOWED]):
                    look()
                    self._train(built, number, batch)
                    peak = look().peak_bytes - begin
            for number, batch in enumerate(data[_FOLLOWED:], _FOLLOWED):
                self._train(built, number, batch)
            held_loss = self._held_loss(built, held)
        scale = built.update.state()["loss_scale"]
        return PrecisionRun(
            precision=self._name,
            step_s=(),
            peak_bytes=peak,
            losses=tuple(self._losses),
            held_loss=held_loss,
            output_error=error,
            skipped=self._skipped,
            scale=None if scale is None else float(scale["scaler"]["scale"]),
            trouble=self._trouble,
        )

    def _output_error(self, built: BuiltStep, batch: Any) -> float | None:
        if self._reference is None:
            return None
        sample = move_to_device(_first_sample(batch), self._world.device)
        with built.precision.autocast(self._world.device):
            given = _outputs(built, built.model, sample)
        return _finite((given - self._reference).norm() / self._reference.norm())

    def _train(self, built: BuiltStep, number: int, batch: Any) -> None:
        """Run a step; if only the loss scale was too large, repeat it with a smaller one.

        So all precisions train on the same data, and only the precision differs.
        """
        for _ in range(_MOST_TRIES):
            torch.manual_seed(number)  # for dropout
            loss, outcome = _precision_step(built, number, batch)
            value = _finite(loss)
            if outcome.applied:
                break
            self._skipped += 1
            if value is None or not outcome.overflowed:
                self._look_for_cause(built, number, outcome)
                break
        self._losses.append(value)

    def _look_for_cause(self, built: BuiltStep, number: int, outcome: StepResult) -> None:
        if self._trouble:
            return
        looking = BadNumbers(
            built.model, self._world, precision=built.precision, most_in_a_row=_NEVER
        )
        found = looking.examine(number, outcome.micro_batches, built.loss)
        self._trouble = found.what.partition("; all ranks")[0]

    def _held_loss(self, built: BuiltStep, held: Sequence[Any]) -> float | None:
        built.model.eval()
        with torch.no_grad():
            losses = [
                _precision_mean(*built.loss_of(move_to_device(one, self._world.device)))
                for one in held
            ]
        built.model.train()
        return _finite(torch.stack(losses).mean())


def _precision_step(built: BuiltStep, number: int, batch: Any) -> tuple[torch.Tensor, StepResult]:
    """Make one whole step with a batch."""
    size = built.candidate.micro_batch_size
    step = Step(
        epoch=0,
        number=number,
        rounds=1,
        samples=size,
        nominal_samples=size,
        micro_batches=[MicroBatch(batch=move_to_device(batch, built.world.device), samples=size)],
    )
    for micro in built.update.accumulate(step):
        loss, count = built.loss_of(micro.batch)
        built.update.backward(loss, count)
    return _precision_mean(loss.detach(), count), built.update.apply()


def _precision_mean(loss: torch.Tensor, count: int | torch.Tensor | None) -> torch.Tensor:
    return loss if count is None else loss / count


def _finite(value: torch.Tensor) -> float | None:
    return float(value) if math.isfinite(float(value)) else None


def _precision_times(
    request: PrecisionRequest, built: BuiltStep, names: Sequence[str], batch: Any
) -> dict[str, tuple[float, ...]]:
    """Time interleaved steps of one model in all precisions."""
    turns: dict[str, Callable[[], object]] = {}
    for name in names:
        precision = PRECISIONS["fp32" if name == "tf32" else name]
        update = TrainStep(
            built.model,
            built.optimizer,
            built.strategy,
            built.world,
            precision=precision,
            clip_norm=request.work.clip_norm,
        )
        turns[name] = partial(
            _timed_step, name, replace(built, update=update, precision=precision), batch
        )
    return interleaved(
        turns, device=built.world.device, rounds=request.rounds, warm_up_s=request.warm_up_s
    )


def _timed_step(name: str, built: BuiltStep, batch: Any) -> None:
    with _arithmetic(name):
        _precision_step(built, 0, batch)


def main(request: str, answers: str) -> None:
    """Read the request, train, and write the answer."""
    asked = msgspec.json.decode(Path(request).read_bytes(), type=PrecisionRequest)
    with join_world(asked.device) as world:
        found = measure_precisions(asked, world)
    leave_answer(answers, 0, msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
