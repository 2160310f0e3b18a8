"""The numbers of a run go where the settings say, sent by a process beside rank 0."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchmuster.config.here import check_sinks
from torchmuster.config.resolve import Resolved
from torchmuster.config.settings import Settings
from torchmuster.errors import ConfigError, Impossible
from torchmuster.monitor.sinks.beside_rank import not_sent, sending
from torchmuster.monitor.sinks.sink import wanted_by
from torchmuster.runfolder import RunFolder
from torchmuster.train.agreement import tell_all
from torchmuster.train.world import World
from torchmuster.worker.speaking import say


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
    (problem, *_) = tell_all(problem, world)
    if problem:
        raise Impossible("rank 0 cannot send the run's numbers as asked", why=problem)


@contextmanager
def sent_beside(settings: Settings, world: World, folder: Path) -> Iterator[None]:
    """Have the numbers of a run sent while it goes on; say at its end what could not be sent."""
    wanted = wanted_by(settings)
    if not world.is_first or not wanted.sinks:
        yield
        return
    with sending(folder, wanted):
        yield
    for line in not_sent(RunFolder(folder), wanted.sinks):
        say(world, line)
