"""Everything that one machine serves: itself, its accelerators, its ranks of the runs in a folder, and the runs that it speaks for.

A folder may be on a disk that all machines share. Then each machine's exporter tells of what was written on it, so that each
series comes once, however many machines there are.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from torchmuster.devices.model import Node
from torchmuster.launch.history import node_ranks, run_state
from torchmuster.monitor import catalogue
from torchmuster.monitor.collecting import device_metrics, rank_metrics
from torchmuster.monitor.collecting.active_runs import ActiveRuns
from torchmuster.monitor.collecting.host_metrics import HostMetrics
from torchmuster.monitor.metric import Sample
from torchmuster.runfolder import RunFolder

# Ranks have a few series each; whatever else happens, one machine serves no more than this.
MOST_SERIES = 50_000
# Who asks twice within so long is given the same answer: asking often costs the machine nothing.
_FRESH_S = 1.0


class Collector:
    """Collects samples when it is asked; safe to be asked by several threads at once."""

    def __init__(
        self,
        runs: Path,
        look: Callable[[], Node],
        *,
        all_ranks: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Collect of the runs in a folder; ``look`` takes a look at this machine's devices.

        With ``all_ranks`` those of other machines are told of as well: where nobody else does.
        """
        self._runs = runs
        self._look = look
        self._all_ranks = all_ranks
        self._clock = clock
        self._active = ActiveRuns(runs)
        self._host: HostMetrics | None = None
        self._turn = threading.Lock()
        self._answer: tuple[float, list[Sample]] | None = None

    def samples(self) -> list[Sample]:
        """Return everything that is known now."""
        with self._turn:
            now = self._clock()
            if self._answer is None or not 0 <= now - self._answer[0] < _FRESH_S:
                self._answer = (now, self._collect(now))
            return self._answer[1]

    def _collect(self, now: float) -> list[Sample]:
        began = time.perf_counter()
        node = self._look()
        self._host = self._host or HostMetrics(node.hostname, self._runs)
        found = [*self._host.samples(), *device_metrics.samples(node)]
        for run in self._active.now(now):
            labels = (run.job, run.folder.id)
            if self._all_ranks or _speaks_for(node.hostname, run.folder):
                found += run.metrics.samples(now)
                found += rank_metrics.number(node_ranks.read(run.folder, now), labels)
            machine = None if self._all_ranks else node.hostname
            nodes = node_ranks.read(run.folder, now, written_on=machine)
            found += rank_metrics.samples(nodes, labels)
        del found[MOST_SERIES:]
        took_s = time.perf_counter() - began
        found.append(Sample(catalogue.EXPORTER_TIME, (node.hostname,), took_s))
        found.append(Sample(catalogue.EXPORTER_SERIES, (node.hostname,), float(len(found))))
        return found


def _speaks_for(machine: str, run: RunFolder) -> bool:
    """Say whether a machine tells of a run as a whole: it runs the first rank, or launched it.

    Two may: where the one is gone, the other one still tells how the run ends.
    """
    job = run_state.read_job(run)
    if job is None or job.launcher.host == machine:
        return True
    return node_ranks.place(run, machine, 0).exists()
