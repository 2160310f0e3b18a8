"""A rank that measures the memory of real training steps by stage, and tries recompute modes."""

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from torchmuster.bench.memory import (
    PARTS,
    MemoryAnswer,
    MemoryRequest,
    OfPrecision,
    RecomputeMode,
    StageTaken,
    recompute_modes_for,
)
from torchmuster.bench.probes.clock import interleaved
from torchmuster.plan.job import Candidate, Recompute
from torchmuster.plan.probes.build_step import BuiltStep, build_step
from torchmuster.plan.probes.live_storage import Look, tensor_memory
from torchmuster.plan.proof.fresh_ranks import leave_answer
from torchmuster.train import precision
from torchmuster.train.models.blocks import recompute_blocks, repeated_blocks
from torchmuster.train.out_of_memory import is_out_of_memory, local_bytes, memory_table
from torchmuster.train.world import World, join_world

_WARM_UP_S = 0.5
_STEADY = 2  # steps of which the lower peak counts: a thread may free memory late


def measure_stages(request: MemoryRequest, world: World) -> MemoryAnswer:
    """Measure the stages in two precisions, and try every recompute mode in the first one."""
    cards = precision.precision_support(world)
    chosen = precision.choose_precision(request.precision, cards)
    main = chosen.value.name
    # fp32, and the default of accelerators; CPUs support bf16.
    reduced = precision.choose_precision("auto", cards).value.name
    other = "fp32" if main != "fp32" else ("bf16" if reduced == "fp32" else reduced)
    trial = _Trial(request, replace(request.candidate, precision=main), world)
    stages = [OfPrecision(precision=main, stages=trial.stages())]
    ways = trial.ways()
    counts = trial.built.parameter_count, len(trial.built.blocks)
    trial.forget()
    beside = _Trial(request, replace(request.candidate, precision=other), world)
    stages.append(OfPrecision(precision=other, stages=beside.stages()))
    return MemoryAnswer(
        rank=world.global_rank,
        device=str(world.device),
        limit_bytes=memory_table(None, None, world.device).limit_bytes,
        precision=main,
        precision_reason=chosen.reason,
        parameter_count=counts[0],
        blocks=counts[1],
        stages=tuple(stages),
        ways=tuple(ways),
    )


class _Trial:
    """A training run; rebuilt after running out of memory, since a step was interrupted."""

    def __init__(self, request: MemoryRequest, candidate: Candidate, world: World) -> None:
        self._request = request
        self._candidate = candidate
        self._world = world
        self.built: BuiltStep
        self._switch: RecomputeSwitch

    def _build(self) -> None:
        self.forget()
        plain = replace(self._candidate, recompute="none")
        self.built = build_step(self._request.work, plain, self._world)
        self._switch = RecomputeSwitch(self.built.model)

    def forget(self) -> None:
        """Free all memory."""
        self.__dict__.pop("built", None)
        self.__dict__.pop("_switch", None)
        gc.collect()
        if self._world.device.type != "cpu":
            torch.accelerator.empty_cache()

    def stages(self) -> tuple[StageTaken, ...]:
        """Measure the first two steps with the recompute mode of the settings.

        None if out of memory.
        """
        with tensor_memory(self._world.device) as look:
            begin = look().live_bytes
            self._build()
            self._switch.use(self._candidate.recompute)
            try:
                found = followed_stages(self.built, look, begin)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                found = ()
        if not found:
            self._build()
        return found

    def ways(self) -> list[RecomputeMode]:
        """Try all modes: first the memory, largest saving first.

        Then the time of those that fit.
        """
        ways = recompute_modes_for(len(self.built.blocks))
        peaks = {way: self._peak(way) for way in ways}
        fitting = [way for way, peak in peaks.items() if peak is not None]
        turns = {str(way): partial(self._step, way) for way in fitting}
        times = interleaved(
            turns, device=self._world.device, rounds=self._request.rounds, warm_up_s=_WARM_UP_S
        )
        return [
            RecomputeMode(
                recompute=way,
                blocks=self._switch.count(way),
                peak_bytes=None if peak is None else peak[0],
                reserved_bytes=None if peak is None else peak[1],
                step_s=times.get(str(way), ()),
            )
            for way, peak in peaks.items()
        ]

    def _step(self, way: Recompute) -> None:
        self._switch.use(way)
        self.built.train()

    def _peak(self, way: Recompute) -> tuple[int, int | None] | None:
        """Return peak live and reserved memory of a step; None if out of memory."""
        device = self._world.device
        if device.type != "cpu":
            torch.accelerator.empty_cache()
        try:
            if not self.built.optimizer.state:  # the step that creates the states is different
                self._step(way)
            with tensor_memory(device) as look:
                _show_memory(self.built, look)
                peaks = []
                for _ in range(_STEADY):
                    look()
                    self._step(way)
                    peaks.append(look().peak_bytes)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._build()
            return None
        reserved = None
        if device.type != "cpu":
            reserved = int(torch.accelerator.max_memory_reserved(device))
        return min(peaks), reserved


def _show_memory(built: BuiltStep, look: Look) -> None:
    """Show existing tensors to a memory tracker, which only sees operands of operations."""
    with torch.no_grad():
        for one in (*built.model.parameters(), *built.model.buffers(), *_states(built)):
            one.view_as(one)
    look()


def followed_stages(built: BuiltStep, look: Look, begin_bytes: int = 0) -> tuple[StageTaken, ...]:
    """Run two steps and return the memory before, in and after each stage.

    ``begin_bytes`` is the memory in use on the device before the model was built.
    """
    found: list[StageTaken] = []
    where = {"step": 0, "micro_batch": 0}

    def note(name: str) -> None:
        taken = look()
        live, peak = taken.live_bytes - begin_bytes, taken.peak_bytes - begin_bytes
        before = found[-1].after_bytes if found else 0
        same = found[-1:] and (found[-1].name, found[-1].step) == (name, where["step"])
        if (
            same and found[-1].micro_batch == where["micro_batch"]
        ):  # the model is called several times
            last = found.pop()
            before, peak = last.before_bytes, max(peak, last.peak_bytes)
        found.append(
            StageTaken(
                name=name,
                step=where["step"],
                micro_batch=where["micro_batch"],
                before_bytes=before,
                peak_bytes=peak,
                after_bytes=live,
                parts=_memory_parts(built, live),
            )
        )

    def computed(module: nn.Module, args: Any, output: Any) -> None:
        note("forward")

    note("model built")
    with _hooked(built.model, computed):
        for step in (1, 2):
            where["step"] = step
            for number, micro in enumerate(built.update.accumulate(built.step(step)), 1):
                where["micro_batch"] = number
                loss, count = built.loss_of(micro.batch)
                note("loss")
                built.update.backward(loss, count)
                del loss
                note("backward")
            where["micro_batch"] = 0
            built.update.apply()
            note("optimizer step")
    return tuple(found)


@contextmanager
def _hooked(model: nn.Module, hook: Any) -> Iterator[None]:
    handle = model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _memory_parts(built: BuiltStep, live_bytes: int) -> Mapping[str, int]:
    parameters = list(built.model.parameters())
    sizes = (
        local_bytes([*parameters, *built.model.buffers()]),
        local_bytes([one.grad for one in parameters if one.grad is not None]),
        local_bytes(_states(built)),
    )
    return dict(zip(PARTS, (*sizes, max(live_bytes - sum(sizes), 0)), strict=True))


def _states(built: BuiltStep) -> Sequence[torch.Tensor]:
    return [
        value
        for state in built.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


class RecomputeSwitch:
    """Switches the recomputed blocks of a model between steps."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._blocks = repeated_blocks(model)
        self._plain = [vars(one).get("forward") for one in self._blocks]
        self._known: dict[Recompute, tuple[int, list[Any]]] = {
            "none": (0, self._plain),
        }

    def count(self, way: Recompute) -> int:
        """Return the number of recomputed blocks of a mode."""
        return self._made(way)[0]

    def use(self, way: Recompute) -> None:
        """Apply the recompute mode from the next step on."""
        self._put(self._made(way)[1])

    def _made(self, way: Recompute) -> tuple[int, list[Any]]:
        if way not in self._known:
            self._put(self._plain)
            if isinstance(way, int):
                chosen = recompute_blocks(self._model, every=way)
            else:
                assert way != "none"
                chosen = recompute_blocks(self._model, way)
            self._known[way] = chosen.value, [vars(one).get("forward") for one in self._blocks]
        return self._known[way]

    def _put(self, forwards: list[Any]) -> None:
        for block, forward in zip(self._blocks, forwards, strict=True):
            vars(block).pop("forward", None)
            if forward is not None:
                vars(block)["forward"] = forward


def main() -> None:
    """Read the request, measure, and write the answer."""
    asked, answers = sys.argv[1:]
    request = msgspec.json.decode(Path(asked).read_bytes(), type=MemoryRequest)
    with join_world(request.device) as world:
        found = measure_stages(request, world)
    leave_answer(answers, found.rank, msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
