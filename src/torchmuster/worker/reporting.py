"""What rank 0 says and keeps of a run: lines, the comparison with its plan, and the process that feeds trackers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from torchmuster.config.here import check_sinks
from torchmuster.config.resolve import Resolved
from torchmuster.config.settings import Settings
from torchmuster.errors import ConfigError, Impossible
from torchmuster.monitor.sinks.sidecar import not_sent_finding, send_in_background
from torchmuster.monitor.sinks.sink import wanted_by
from torchmuster.plan.hardware import catalogue
from torchmuster.plan.proof import comparison
from torchmuster.plan.proof.comparison import COMPARED_AFTER, MeasuredRun, Promise
from torchmuster.runfolder import RunFolder
from torchmuster.train.metrics.reports import Lines, Reports
from torchmuster.train.metrics.step_line import StepRecord
from torchmuster.train.world import World, all_gather_object


def peak_flops(device: torch.device, model: nn.Module, compute: torch.dtype) -> float | None:
    """Return the device's highest rate in the type that a model is computed in; None where nobody has said it."""
    if device.type != "cuda":
        return None
    weights = {one.dtype for one in model.parameters()} - {torch.float32}
    if compute is torch.float32 and weights:
        return None  # the weights decide, and not all of them need be of one type
    known = catalogue.find_gpu(torch.cuda.get_device_name(device))
    if known is None:
        return None
    if compute is torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return None  # TF32 has a rate of its own, which the catalogue does not have
    return known.card.flops.get(str(compute).removeprefix("torch."))


def rank_zero_log(world: World, text: str) -> None:
    """Print a text, on rank 0."""
    if world.is_first:
        Lines().say(text)


def reports_for(settings: Settings, world: World, folder: Path) -> Reports:
    """Return what shows and keeps the lines of a run; after its third step it is held against its plan."""
    promise = _promise(world, folder)
    # The folder may be on the first machine only, and all ranks make a line after the same step.
    (has_promise, *_) = all_gather_object(promise is not None, world)

    def compare(record: StepRecord) -> None:
        if promise is not None and record.step == COMPARED_AFTER:
            reports.say(comparison.comparison_line(promise, _measured(record, world)))

    reports = Reports(
        world,
        folder=folder,
        log_every=settings.train.log_every,
        on_record=(compare,),
        also_at=COMPARED_AFTER if has_promise else None,
    )
    return reports


def _promise(world: World, folder: Path) -> Promise | None:
    if not world.is_first:
        return None
    try:
        promise = comparison.read_promise(folder)
    except Impossible as error:  # a training must not fail because of its plan
        rank_zero_log(world, f"{error.what}: not compared")
        return None
    if promise is not None and promise.candidate.layout.ranks != world.world_size:
        planned = promise.candidate.layout.ranks
        rank_zero_log(
            world, f"planned for {planned} ranks, but there are {world.world_size}: not compared"
        )
        return None
    return promise


def _measured(record: StepRecord, world: World) -> MeasuredRun:
    on_cpu = world.device.type == "cpu"
    return MeasuredRun(
        steps=record.step,
        step_s=record.step_s,
        tensor_bytes=None if on_cpu else record.memory_peak_bytes,
    )


def refuse_missing_sinks(resolved: Resolved, world: World) -> None:
    """End on all ranks, before anything is trained, where rank 0's machine lacks what a sink needs."""
    if not resolved.settings.metrics.sinks:
        return
    problem = ""
    if world.is_first:
        try:
            check_sinks(resolved)
        except ConfigError as error:
            problem = error.why
    (problem, *_) = all_gather_object(problem, world)
    if problem:
        raise Impossible("rank 0 cannot send the run's numbers as asked", why=problem)


@contextmanager
def start_sinks(settings: Settings, world: World, folder: Path) -> Iterator[None]:
    """Have the numbers of a run sent while it goes on; say at its end what could not be sent."""
    wanted = wanted_by(settings)
    if not world.is_first or not wanted.sinks:
        yield
        return
    with send_in_background(folder, wanted):
        yield
    for line in not_sent_finding(RunFolder(folder), wanted.sinks):
        rank_zero_log(world, line)
