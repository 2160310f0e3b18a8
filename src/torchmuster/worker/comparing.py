"""What a run tells, and how it compares with its plan, where one was made for it."""

from pathlib import Path

from torchmuster.config.settings import Settings
from torchmuster.errors import Impossible
from torchmuster.plan.proof import comparison
from torchmuster.plan.proof.comparison import COMPARED_AFTER, Measured, Promise
from torchmuster.train.agreement import tell_all
from torchmuster.train.metrics.reports import Reports
from torchmuster.train.metrics.step_line import StepRecord
from torchmuster.train.world import World
from torchmuster.worker.speaking import say


def reports_of(settings: Settings, world: World, folder: Path) -> Reports:
    """Return what shows and keeps the lines of a run; after its third step it is held against its plan."""
    promise = _promise(world, folder)
    # The folder may be on the first machine only, and all ranks make a line after the same step.
    (has_promise, *_) = tell_all(promise is not None, world)

    def compare(record: StepRecord) -> None:
        if promise is not None and record.step == COMPARED_AFTER:
            reports.say(comparison.line(promise, _measured(record, world)))

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
        promise = comparison.read(folder)
    except Impossible as error:  # a training must not fail because of its plan
        say(world, f"{error.what}: not compared")
        return None
    if promise is not None and promise.candidate.layout.ranks != world.world_size:
        planned = promise.candidate.layout.ranks
        say(world, f"planned for {planned} ranks, but there are {world.world_size}: not compared")
        return None
    return promise


def _measured(record: StepRecord, world: World) -> Measured:
    on_cpu = world.device.type == "cpu"
    return Measured(
        steps=record.step,
        step_s=record.step_s,
        tensor_bytes=None if on_cpu else record.memory_peak_bytes,
    )
