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
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class _Arriving:
    """A line with numbers that are on their way from the device."""

    line: dict[str, Any]
    tensors: dict[str, Any]  # on the host
    event: Any  # of the device, after the copies

    def whole(self) -> dict[str, Any]:
        """Return the line with its numbers, once they have arrived."""
        numbers = {name: _finite(float(tensor)) for name, tensor in self.tensors.items()}
        return self.line | numbers


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
        self._arriving: deque[_Arriving] = deque()
        self._counted = 0  # steps in this process
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()  # the optimizers of this step
        self._offset = 0  # of a resumed run
        self._optimizer: Any = None
        self._stepped_s: float | None = None
        self._loader: int | None = None  # that was read last
        self._samples = 0  # that it gave since the last step
        self._data_s = 0.0
        self.data_share: float | None = None  # of the last line
        self._library_saves = False  # it reports its checkpoints itself, not file by file
        self._last_saved: dict[str, Any] | None = None  # its line
        self._begin_line()

    def _begin_line(self) -> None:
        self._line_s = self._clock()
        self._line_steps = 0
        self._line_samples = 0
        self._line_data_s = self._data_s
        self._times: deque[float] = deque(maxlen=_MOST_STEPS)

    @property
    def step(self) -> int | None:
        """Number of optimizer steps, including those before a resume if known; None before the first step."""
        return self._offset + self._counted if self._counted else None

    @property
    def device(self) -> Any:
        """The device of the first parameter that is trained; None before the first step."""
        with contextlib.suppress(Exception):
            return self._optimizer.param_groups[0]["params"][0].device
        return None

    # ---- called by the training thread

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Count a step, unless it is that of another optimizer in the same step of the training."""
        is_same_step = len(self._stepped) > 0 and optimizer not in self._stepped
        if not is_same_step:
            self._stepped.clear()
        self._stepped.add(optimizer)
        if is_same_step:
            return
        self._counted += 1
        now = self._clock()
        with self._turn:
            if self._stepped_s is not None:
                self._times.append(now - self._stepped_s)
            self._stepped_s = now
            self._optimizer = optimizer
            self._line_steps += 1
            self._line_samples += self._samples
            self._samples = 0

    def batch_read(self, loader: int, seconds: float, samples: int) -> None:
        """Add the time that the script waited for a batch, and its samples."""
        if loader != self._loader:  # an evaluation between two steps does not count
            self._loader, self._samples = loader, 0
        self._samples += samples
        self._data_s += seconds

    def resume_at(self, step: int) -> None:
        """Count from the step of the checkpoint that the script resumes from."""
        self._offset = step - self._counted

    def begin_at(self, step: int) -> None:
        """Count from a step that is given by the library that trains and reports its checkpoints."""
        self._library_saves = True
        self.resume_at(step)

    def log(self, numbers: Mapping[str, Any], step: int | None = None) -> None:
        """Record numbers of a step; tensors on a device are read when they are ready, without waiting."""
        if self._path is None:
            return
        with contextlib.suppress(Exception):  # a device that cannot copy must not stop the script
            while self._arriving and self._arriving[0].event.query():
                self._push(self._arriving.popleft().whole())
            if step is not None and self._counted:
                self.resume_at(int(step))
            line = self._line()
            if step is not None:
                line["step"] = int(step)
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
        """Push a line with those of the numbers that are numbers, as soon as the device has computed them."""
        tensors: dict[str, Any] = {}
        for name, value in numbers.items():
            if name in _OWN_FIELDS or isinstance(value, bool):
                continue
            if isinstance(value, int):
                line[name] = value
            elif isinstance(value, float) or getattr(value, "size", 0) == 1:  # of numpy
                line[name] = _finite(float(value))
            elif hasattr(value, "detach") and value.numel() == 1:
                tensors[name] = value.detach()
        on_device = [tensor for tensor in tensors.values() if tensor.device.type != "cpu"]
        if not on_device:
            self._push(_Arriving(line=line, tensors=tensors, event=None).whole())
            return
        torch = sys.modules["torch"]
        for name, tensor in tensors.items():
            # A blocking read would wait for everything that is queued on the device.
            held = torch.empty_like(tensor, device="cpu", pin_memory=True)
            tensors[name] = held.copy_(tensor, non_blocking=True)
        event = torch.Event(on_device[0].device)
        event.record()
        self._arriving.append(_Arriving(line=line, tensors=tensors, event=event))

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
                self.data_share = min(1.0, (self._data_s - self._line_data_s) / wall_s)
                line["data_share"] = self.data_share
                line["compute_share"] = 1.0 - self.data_share  # with communication
                if self._line_samples and step_s:
                    # Each rank reads its own samples.
                    line["samples"] = self._line_samples * self._world_size
                    line["samples_per_s"] = line["samples"] / self._line_steps / step_s
            rate = _learning_rate(self._optimizer)
            if rate is not None:
                line["learning_rate"] = rate
            self._begin_line()
        return line

    # ---- called by the heartbeat's thread

    def beat(self) -> None:
        """Make a line if the script logged none for a while, and write what is new."""
        if self._line_steps and self._clock() - self._line_s >= _LINE_EVERY_S:
            self._push(self._line())
        self.flush()

    def flush(self) -> None:
        """Write the waiting lines; ranks without a file forget them."""
        with self._turn:
            waiting, self._waiting = self._waiting, []
        if not waiting or self._path is None:
            return
        memory = {"memory_peak_bytes": _memory_peak()}
        text = ""
        for line in waiting:
            text += json.dumps(memory | line if line["file"] == "steps" else line, default=str)
            text += "\n"
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as stream:
            stream.write(text)

    def end(self) -> None:
        """Write the rest at the end of the script."""
        with contextlib.suppress(Exception):
            while self._arriving:
                self._push(self._arriving.popleft().whole())
            if self._line_steps:
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


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _learning_rate(optimizer: Any) -> float | None:
    with contextlib.suppress(Exception):
        rate = optimizer.param_groups[0]["lr"]
        if isinstance(rate, int | float) or rate.device.type == "cpu":
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
