"""Record the steps, losses and checkpoints of a script in its rank.

The training thread only adds numbers in memory; once a second the heartbeat's thread writes what is new to a file,
which the node agent forwards to the launcher. Nothing here communicates with other ranks or waits for a device.
Standard library only.
"""

import contextlib
import json
import math
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# A line without a loss, for scripts that log nothing.
_LINE_EVERY_S = 10.0
_MOST_STEPS = 512  # whose times make one line's median
_MOST_WAITING = 10_000  # entries in memory; more than any script logs in a second
# Names that libraries use -> field of a step line.
_FIELDS = {
    "loss": "loss",
    "train_loss": "loss",
    "train/loss": "loss",
    "training_loss": "loss",
    "grad_norm": "gradient_norm",
    "gradient_norm": "gradient_norm",
    "train/grad_norm": "gradient_norm",
    "learning_rate": "learning_rate",
    "lr": "learning_rate",
    "train/lr": "learning_rate",
    "epoch": "epoch",
}
_OWN_FIELDS = {"step", "at_unix_s", "file"}
# Entries in which scripts save the number of optimizer steps.
_STEP_ENTRIES = ("global_step", "step")


class Recorder:
    """Counts steps and collects what the script or its library logs."""

    def __init__(
        self,
        path: Path | None,
        *,
        world_size: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Write lines to ``path``, which is None on all ranks except 0."""
        self._path = path
        self._world_size = world_size
        self._clock = clock
        self._turn = threading.Lock()  # between the training and the heartbeat's thread
        self._waiting: list[dict[str, Any]] = []
        # Lines whose numbers are on their way from the device: whether they arrived, and the line.
        self._later: deque[tuple[Callable[[], bool], Callable[[], dict[str, Any]]]] = deque()
        self._counts: dict[int, int] = {}  # steps of each optimizer
        self._offset = 0  # of a resumed run, if the library tells its step
        self._optimizer: Any = None
        self._stepped_s: float | None = None
        self._loader: int | None = None
        self._samples: dict[int, int] = {}  # of each loader, since the last step
        self.data_share: float | None = None
        self._data_s = 0.0
        self._shared = (
            self._clock(),
            0.0,
        )  # when the last share was made, and the waiting time until then
        self._begin_line()
        self._library_saves = False  # it reports its checkpoints itself, not file by file
        self._last_saved: dict[str, Any] | None = None  # its line

    def _begin_line(self) -> None:
        self._line_s = self._clock()
        self._line_steps = 0
        self._line_samples = 0
        self._line_data_s = self._data_s
        self._times: deque[float] = deque(maxlen=_MOST_STEPS)

    @property
    def step(self) -> int | None:
        """Number of optimizer steps, including those before a resume if known; None before the first step."""
        return self._offset + max(self._counts.values()) if self._counts else None

    @property
    def device(self) -> Any:
        """The device of the first parameter that is trained; None before the first step."""
        with contextlib.suppress(Exception):
            return self._optimizer.param_groups[0]["params"][0].device
        return None

    # ---- called by the training thread

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Count a step; with several optimizers, the one with the most steps counts."""
        number = self._counts.get(id(optimizer), 0) + 1
        before = self.step or 0
        self._counts[id(optimizer)] = number
        if (self.step or 0) <= before and before:
            return  # another optimizer of the same step
        now = self._clock()
        with self._turn:
            if self._stepped_s is not None:
                self._times.append(now - self._stepped_s)
            self._stepped_s = now
            self._optimizer = optimizer
            self._line_steps += 1
            # Of the loader that was read last: an evaluation between two steps does not count.
            self._line_samples += self._samples.get(self._loader or 0, 0)
            self._samples.clear()

    def batch_read(self, loader: int, seconds: float, samples: int) -> None:
        """Add the time that the script waited for a batch."""
        self._loader = loader
        self._samples[loader] = self._samples.get(loader, 0) + samples
        self._data_s += seconds

    def begin_at(self, step: int) -> None:
        """Count from the step of a resumed run, given by the library that trains and reports its checkpoints."""
        self._library_saves = True
        self._offset = step - max(self._counts.values(), default=0)

    def loaded(self, checkpoint: Any) -> None:
        """Count from the step that a restarted script loads with ``torch.load`` before its first step."""
        if self._counts or not isinstance(checkpoint, dict):
            return
        for name in _STEP_ENTRIES:
            if isinstance(checkpoint.get(name), int):
                self.resume_at(checkpoint[name])
                return

    def resume_at(self, step: int) -> None:
        """Count from the step of the checkpoint that a restarted script loads."""
        self._offset = step

    def log(self, numbers: Mapping[str, Any], step: int | None = None) -> None:
        """Record numbers of a step; tensors on a device are read when they are ready, without waiting."""
        if self._path is None:
            return
        with contextlib.suppress(Exception):  # a device that cannot copy must not stop the script
            self._take_finished()
            if step is not None and self._counts:
                self._offset = int(step) - max(self._counts.values())
            line = self._line() | {"step": int(step if step is not None else self.step or 0)}
            self._add(line, {_FIELDS.get(name, name): value for name, value in numbers.items()})

    def evaluated(self, numbers: Mapping[str, Any], step: int | None = None) -> None:
        """Record the results of an evaluation."""
        if self._path is not None:
            at = int(step if step is not None else self.step or 0)
            with contextlib.suppress(Exception):
                self._add({"file": "evaluations", "step": at}, numbers)

    def saved(
        self, path: str, *, library: str, step: int | None = None, seconds: float | None = None
    ) -> None:
        """Record a checkpoint that the script wrote."""
        if self._path is None:
            return
        step = int(step if step is not None else self.step or self._offset)
        if "://" not in path:
            path = str(Path(path).absolute())
        last = self._last_saved
        if last is not None and (last["path"], last["step"]) == (path, step):
            return
        size = _size_of(Path(path))
        line = {"file": "saves", "step": step, "path": path, "library": library, "bytes": size}
        if seconds is not None:
            line["stall_s"] = round(seconds, 3)
        self._record_save(line)

    def renamed(self, source: str, target: str) -> None:
        """Record the new path of the newest checkpoint, if it was renamed: scripts save to a temporary name first."""
        last = self._last_saved
        if last is not None and str(Path(source).absolute()) == last["path"]:
            path = str(Path(target).absolute())
            self._record_save(last | {"path": path, "renamed_from": last["path"]})

    def _record_save(self, line: dict[str, Any]) -> None:
        self._last_saved = line
        if self._line_steps:  # no view shows a later step as saved than as made
            self._push(self._line())
        self._push(line)
        self.flush()  # at once: the next moment may kill this process

    def file_saved(self, path: str, seconds: float) -> None:
        """Record a file of ``torch.save``, unless it is part of a library's checkpoint."""
        if not self._library_saves:
            self.saved(path, library="torch.save", seconds=seconds)

    @contextlib.contextmanager
    def library_saves(self) -> Iterator[None]:
        """Ignore individual files while a library writes a checkpoint that it reports itself."""
        before, self._library_saves = self._library_saves, True
        try:
            yield
        finally:
            self._library_saves = before

    def _add(self, line: dict[str, Any], numbers: Mapping[str, Any]) -> None:
        plain: dict[str, Any] = {}
        pending: dict[str, Any] = {}
        for name, value in numbers.items():
            if name in _OWN_FIELDS:
                continue
            if isinstance(value, int | float) and not isinstance(value, bool):
                plain[name] = _finite(float(value)) if isinstance(value, float) else value
            elif hasattr(value, "detach") and getattr(value, "numel", lambda: 0)() == 1:
                pending[name] = value
            elif hasattr(value, "item") and getattr(value, "size", 0) == 1:  # a number of numpy
                plain[name] = _finite(float(value.item()))
        line |= plain
        copies = {name: _copy(tensor) for name, tensor in pending.items()}
        if all(ready() for ready, _ in copies.values()):
            self._push(line | {name: read() for name, (_, read) in copies.items()})
            return
        self._later.append(
            (
                lambda: all(ready() for ready, _ in copies.values()),
                lambda: line | {name: read() for name, (_, read) in copies.items()},
            )
        )

    def _take_finished(self) -> None:
        """Push lines whose numbers have arrived from the device; called by the training thread only."""
        while self._later and self._later[0][0]():
            self._push(self._later.popleft()[1]())

    def _push(self, line: dict[str, Any]) -> None:
        with self._turn:
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.append({**line, "at_unix_s": round(time.time(), 3)})

    def _line(self) -> dict[str, Any]:
        """Return the figures since the last line, and begin another one."""
        with self._turn:
            wall_s = self._clock() - self._line_s
            line: dict[str, Any] = {"file": "steps", "step": self.step or 0}
            if self._line_steps and self._times and wall_s > 0:
                # Not the mean: an evaluation or a save between two steps is not part of a step.
                line["step_s"] = step_s = statistics.median(self._times)
                line["data_share"] = min(1.0, (self._data_s - self._line_data_s) / wall_s)
                line["compute_share"] = 1.0 - line["data_share"]  # with communication
                if self._line_samples and step_s:
                    # Each rank reads its own samples.
                    line["samples"] = self._line_samples * self._world_size
                    line["samples_per_s"] = line["samples"] / self._line_steps / step_s
            if (rate := _learning_rate(self._optimizer)) is not None:
                line["learning_rate"] = rate
            self._begin_line()
        return line

    # ---- called by the heartbeat's thread

    def beat(self) -> None:
        """Make a line if the script logged none for a while, and write what is new."""
        now, data_s = self._clock(), self._data_s
        then, before_s = self._shared
        if self._counts and now - then >= _LINE_EVERY_S:
            self.data_share = min(1.0, (data_s - before_s) / (now - then))
            self._shared = now, data_s
        if self._path is None:
            return
        if self._line_steps and now - self._line_s >= _LINE_EVERY_S:
            self._push(self._line())
        self.flush()

    def flush(self) -> None:
        """Write the waiting lines."""
        with self._turn:
            waiting, self._waiting = self._waiting, []
        if waiting and self._path is not None:
            memory = {"memory_peak_bytes": _memory_peak()}
            waiting = [memory | line if line["file"] == "steps" else line for line in waiting]
            text = "".join(json.dumps(line, default=str) + "\n" for line in waiting)
            with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as stream:
                stream.write(text)

    def end(self) -> None:
        """Write the rest at the end of the script."""
        with contextlib.suppress(Exception):
            while self._later:
                self._push(self._later.popleft()[1]())
            if self._path is not None and self._line_steps:
                self._push(self._line())
            self.flush()


recorder: Recorder | None = None


def log(step: int | None = None, **numbers: Any) -> None:
    """Record numbers of the current step, for example ``torchmuster.log(loss=loss)``.

    Under ``muster run`` they appear in ``muster watch``, ``report.html`` and every experiment tracker; elsewhere this
    does nothing. Only rank 0's numbers count. A tensor is read when its value has arrived, so a step does not wait for the
    device. ``step`` is only needed by a script that was resumed: without it, optimizer steps are counted.
    """
    if recorder is not None:
        recorder.log(numbers, step)


def log_evaluation(step: int | None = None, **numbers: Any) -> None:
    """Record the results of an evaluation, as :func:`log` does for a step."""
    if recorder is not None:
        recorder.evaluated(numbers, step)


def begin_recording(rank: int, records: Path, world_size: int) -> Recorder:
    """Record from now on; rank 0 writes ``rank-0.metrics.jsonl`` in the records folder."""
    global recorder  # one per process
    path = records / f"rank-{rank}.metrics.jsonl" if rank == 0 else None
    recorder = Recorder(path, world_size=world_size)
    return recorder


def _copy(tensor: Any) -> tuple[Callable[[], bool], Callable[[], float | None]]:
    """Return whether a tensor's value has arrived on the host, and a function that reads it."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        value = _finite(float(tensor))
        return (lambda: True), (lambda: value)
    torch = sys.modules["torch"]
    # A blocking read would wait for everything that is queued on the device.
    held = torch.empty_like(tensor, device="cpu", pin_memory=True)
    held.copy_(tensor, non_blocking=True)
    arrived = torch.Event(tensor.device)
    arrived.record()
    return arrived.query, (lambda: _finite(float(held)))


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _learning_rate(optimizer: Any) -> float | None:
    with contextlib.suppress(Exception):
        rate = optimizer.param_groups[0]["lr"]
        if isinstance(rate, int | float):
            return float(rate)
        if rate.device.type == "cpu":
            return float(rate)
    return None


def _memory_peak() -> int:
    torch = sys.modules.get("torch")
    with contextlib.suppress(Exception):
        if torch is not None and torch.cuda.is_initialized():
            return int(torch.cuda.max_memory_allocated())
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # the unit of getrusage
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _size_of(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        if path.is_file():
            return path.stat().st_size
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return None
