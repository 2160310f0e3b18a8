"""Everything that one machine serves: itself, its accelerators, the runs in a folder and their ranks."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torchmuster.devices.model import Node
from torchmuster.launch import ledger
from torchmuster.monitor import catalogue
from torchmuster.monitor.collecting import device_metrics, rank_metrics
from torchmuster.monitor.collecting.host_metrics import HostMetrics
from torchmuster.monitor.collecting.run_metrics import RunMetrics
from torchmuster.monitor.metric import Sample
from torchmuster.runfolder import RunFolder, list_runs, name_of

# A run that has ended is still told of for so long, so that everybody hears how.
_TOLD_AFTER_S = 900.0
_MOST_RUNS = 20
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
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Collect of the runs in a folder; ``look`` takes a look at this machine's devices."""
        self._runs = runs
        self._look = look
        self._clock = clock
        self._followed: dict[str, tuple[RunFolder, str, RunMetrics]] = {}
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
        for run, job, metrics in self._active(now):
            found += metrics.samples(now)
            found += rank_metrics.samples(run, job, now)
        del found[MOST_SERIES:]
        took_s = time.perf_counter() - began
        found.append(Sample(catalogue.EXPORTER_TIME, (node.hostname,), took_s))
        found.append(Sample(catalogue.EXPORTER_SERIES, (node.hostname,), float(len(found))))
        return found

    def _active(self, now: float) -> Iterator[tuple[RunFolder, str, RunMetrics]]:
        newest = list_runs(self._runs)[:_MOST_RUNS]
        for run in newest:
            state = ledger.read_state(run)
            over_s = now - state.since_unix_s if state and not state.active else 0.0
            if state is not None and over_s < _TOLD_AFTER_S:
                if run.id not in self._followed:
                    job = name_of(run)
                    self._followed[run.id] = (run, job, RunMetrics(run, job))
                yield self._followed[run.id]
        known = {run.id for run in newest}
        for gone in [one for one in self._followed if one not in known]:
            del self._followed[gone]
