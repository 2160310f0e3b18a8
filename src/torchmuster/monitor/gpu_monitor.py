"""``GPUMonitor``: curves, metrics and alerts for your own training loop and its GPUs."""

import atexit
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress

from torchmuster.devices.as_json import device_numbers
from torchmuster.devices.model import Node
from torchmuster.devices.readers.nvml import keep_nvml_open
from torchmuster.devices.snapshot import take_snapshot
from torchmuster.devices.visibility import visible
from torchmuster.errors import Impossible
from torchmuster.monitor import catalogue
from torchmuster.monitor.alert_watch import AlertNews, AlertWatch
from torchmuster.monitor.alerts import EXPLAIN
from torchmuster.monitor.collecting import collector
from torchmuster.monitor.exporter import serve_metrics
from torchmuster.monitor.metric import Metric, Sample
from torchmuster.monitor.trackers import TensorBoard

_log = logging.getLogger(__name__)

# Names in scripts of the catalogue's metrics; any other name is exported as an evaluation result.
_KNOWN: Mapping[str, Metric] = {
    "loss": catalogue.LOSS,
    "epoch": catalogue.EPOCH,
    "learning_rate": catalogue.LEARNING_RATE,
    "gradient_norm": catalogue.GRADIENT_NORM,
    "samples_per_s": catalogue.SAMPLES_RATE,
    "tokens_per_s": catalogue.TOKENS_RATE,
}
_WAIT_FOR_LOOK_S = 5.0


class GPUMonitor:
    """Monitors the GPUs visible to this process, and records what the training loop logs.

    ``tensorboard_folder`` gets curves, ``prometheus_port`` serves metrics on the loopback address
    (0 picks a free port, see ``port``), and ``on_alert`` is called with a text when an alert is
    raised or resolved; without it, alerts are logged. A background thread polls the GPUs every
    ``look_every_s`` seconds; ``log_metrics`` does not wait for it. Under torchrun the first rank of
    each host does this, only rank 0 writes curves, and on the other ranks ``log_metrics`` returns
    immediately::

        with GPUMonitor(tensorboard_folder="curves", prometheus_port=9478) as monitor:
            for step, batch in enumerate(loader):
                ...
                monitor.log_metrics(step, {"loss": loss, "samples_per_s": rate})
    """

    def __init__(
        self,
        *,
        name: str = "training",
        look_every_s: float = 2.0,
        tensorboard_folder: str | os.PathLike[str] | None = None,
        prometheus_port: int | None = None,
        on_alert: Callable[[str], None] | None = None,
    ) -> None:
        self._labels = (name, f"{name}-{os.getpid()}")
        self._look_every_s = look_every_s
        self._on_alert = on_alert
        self._watching = AlertWatch()
        self._node: Node | None = None
        self._values: dict[str, float] = {}
        self._last: tuple[int, float] | None = None  # step, when
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._board: TensorBoard | None = None
        self.port: int | None = None
        self._watches = _number_in("LOCAL_RANK") == 0
        with ExitStack() as stack:
            if self._watches:
                stack.enter_context(keep_nvml_open())
                if tensorboard_folder is not None and _number_in("RANK") == 0:
                    self._board = TensorBoard(tensorboard_folder)
                    stack.callback(self._close_board)
                if prometheus_port is not None:
                    self.port = stack.enter_context(
                        serve_metrics(self._all_samples, port=prometheus_port)
                    )
                self._look()
                thread = threading.Thread(target=self._watch, name="GPUMonitor", daemon=True)
                thread.start()
                stack.callback(thread.join, _WAIT_FOR_LOOK_S)
            self._stack = stack.pop_all()
        atexit.register(self.close)  # scripts that do not call close() lose no data

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Log values of a step; return them together with the GPU values and ``steps_per_s``."""
        values = {name: _number(name, value) for name, value in metrics.items()}
        with self._lock:
            now_s = time.monotonic()
            if self._last is not None and step > self._last[0] and now_s > self._last[1]:
                values["steps_per_s"] = (step - self._last[0]) / (now_s - self._last[1])
            self._values, self._last = values, (step, now_s)
            devices = () if self._node is None else self._node.accelerators
        gpus: dict[str, float] = {}
        for device in devices:
            gpus |= device_numbers(device)
        self._draw({f"train/{name}": value for name, value in values.items()} | gpus, step)
        return {**values, **gpus}

    @property
    def alerts(self) -> list[str]:
        """The active alerts, one sentence each."""
        with self._lock:
            return [item.summary for item in self._watching.raised]

    def close(self) -> None:
        """Poll once more, flush, and stop the server; may be called twice."""
        if not self._over.is_set():
            self._over.set()
            self._stack.close()
            atexit.unregister(self.close)

    def _close_board(self) -> None:
        if self._board is not None:
            with suppress(Exception):  # a full disk
                self._board.close()

    def __enter__(self) -> "GPUMonitor":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _draw(self, numbers: Mapping[str, float], step: int) -> None:
        """Append to the curves; a full disk must not stop the training."""
        if self._board is None:
            return
        try:
            self._board.add(numbers, step)
        except Exception as error:  # errors of the writer thread are raised here
            self._board = None
            _log.warning("stopped writing TensorBoard curves: %s", error)

    def _watch(self) -> None:
        while not self._over.wait(self._look_every_s):
            self._look()
        self._look()

    def _look(self) -> None:
        node = take_snapshot()
        seen = tuple(visible(node.accelerators, os.environ).devices)
        with self._lock:
            self._node = dataclasses.replace(node, accelerators=seen)
            news = self._watching.look(self._samples(), time.monotonic())
        for event in news:
            self._report(event)

    def _report(self, news: AlertNews) -> None:
        text = f"resolved: {news.summary}"
        if news.raised:
            text = f"{news.alert.severity}: {news.summary}: {news.alert.why}"
            if news.alert.fix != EXPLAIN:  # there is no run folder here
                text += f"; fix: {news.fix}"
        if self._on_alert is not None:
            self._on_alert(text)
        else:
            _log.log(logging.WARNING if news.raised else logging.INFO, "%s", text)

    def _all_samples(self) -> list[Sample]:
        with self._lock:
            return list(self._samples())

    def _samples(self) -> Iterator[Sample]:
        """Yield the current samples, like the exporter; call with the lock held."""
        if self._node is not None:
            yield from collector.device_samples(self._node)
        yield Sample(catalogue.RUN_PHASE, (*self._labels, "running"), 1.0)
        if self._last is None:
            return
        step, at_s = self._last
        yield Sample(catalogue.STEPS, self._labels, float(step))
        yield Sample(catalogue.STEP_AGE, self._labels, time.monotonic() - at_s)
        known = {_KNOWN[name]: value for name, value in self._values.items() if name in _KNOWN}
        for metric, value in known.items():
            yield Sample(metric, self._labels, value)
        for name, value in self._values.items():
            if name not in _KNOWN:
                yield Sample(catalogue.EVALUATION, (*self._labels, name), value)


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # also accepts one-element tensors
    except (TypeError, ValueError, RuntimeError) as error:
        raise Impossible(
            f"the metric {name!r} is not a number",
            why=f"it is {type(value).__name__}: {error}",
            fix="log a number or a one-element tensor",
        ) from error


def _number_in(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0
