"""Profile the requested steps with torch.profiler, and say where their time went.

The events are read in the process from ``profile.events()``; the trace file is for people, who open
it in Perfetto.
"""

import gzip
import re
import shutil
import statistics
import tempfile
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from torchmuster.profile.facts import Operation, ProfileRequest, Trace

_MOST_OPERATIONS = 12
_SMALL_US = 20.0  # launching a PyTorch operation takes some microseconds on the host
_LAUNCH_BOUND_FROM = 0.5  # share of a host's time in small operations
_IDLE_FROM = 0.2  # share of a device's step
_STEP = "muster:step#"
_BACKWARD = "autograd::engine::evaluate_function"
# As in HolisticTraceAnalysis: parts of kernel names for communication and memory copies.
_SENDS = re.compile(r"^(?:nccl|rccl|mscclpp)|.*(nccl|rccl)(?:Dev)?Kernel", re.IGNORECASE)
_COPIES = re.compile(r"^(Memcpy|Memset)|^dma", re.IGNORECASE)
_BLOCKS = re.compile(r"^(cuda|hip)(Stream|Device|Event)Synchronize$|^(cuda|hip)Memcpy$")
_NOT_COMPUTING = re.compile(r"^(c10d::|record_param_comms|cuda|hip|cu[A-Z])")
# An activity of the host, and the share of the step that it is; the first active one counts.
_HOST_SHARES = (
    ("save", "save"),
    ("data", "data"),
    ("reads", "reads"),
    ("communication", "exposed"),
    ("optimizer", "optimizer"),
)


class Span(NamedTuple):
    """An activity from begin to end, in microseconds."""

    begin: float
    end: float
    activity: str


class StepTrace:
    """Profiles the steps of a request, after one that includes the one-time work of the profiler.

    The profiler starts and stops only once: a second start inside ``optimizer.step``, which is a
    range of the profiler itself, crashes torch 2.13.
    """

    def __init__(self, request: ProfileRequest, rank: int) -> None:
        self._wanted = request.traces and (request.on_ranks is None or rank in request.on_ranks)
        self._first, self._last = request.first_step, request.last_step
        self._path = Path(request.into) / f"rank-{rank}.trace.json.gz"
        self._profile: profile | None = None
        self._mark: record_function | None = None
        self._running = False

    def before(self, step: int) -> bool:
        """Start the profiler if it is due in a step; return whether it runs."""
        if not self._wanted or not self._first - 1 <= step <= self._last:
            return False
        if self._profile is None:
            self._profile = profile(activities=_activities())
            self._profile.start()
            self._running = True
        if step >= self._first:
            self._mark = record_function(f"{_STEP}{step}")
            self._mark.__enter__()  # type: ignore[no-untyped-call]
        return True

    def after(self, step: int) -> None:
        """Stop the profiler after the last step."""
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
        if step == self._last:
            self.stop()

    def stop(self) -> None:
        """Stop the profiler if it runs."""
        if self._running and self._profile is not None:
            self._profile.stop()
            self._running = False

    def write(self) -> Trace | None:
        """Write the trace, and return what it shows; None if nothing was traced."""
        self.stop()
        if self._profile is None:
            return None
        with tempfile.TemporaryDirectory(dir=self._path.parent) as folder:
            plain = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(plain))
            # "x": do not overwrite an existing trace.
            with plain.open("rb") as source, gzip.open(self._path, "xb", compresslevel=4) as target:
                shutil.copyfileobj(source, target)
        events = self._profile.events()  # type: ignore[no-untyped-call]
        return summarize(events or [], self._path.name)


def _activities() -> list[ProfilerActivity]:
    activities = [ProfilerActivity.CPU]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and hasattr(ProfilerActivity, accelerator.type.upper()):
        activities.append(getattr(ProfilerActivity, accelerator.type.upper()))
    return activities


def summarize(events: Sequence[Any], file: str) -> Trace | None:
    """Return what the profiler's events show of the marked steps; None without a marked step."""
    marks = [event for event in events if event.name.startswith(_STEP) and _is_on_host(event)]
    if not marks:
        return None
    kernels = [event for event in events if _is_kernel(event)]
    on_device = bool(kernels)
    threads = {marks[0].thread}
    threads.update(event.thread for event in events if event.name.startswith(_BACKWARD))
    host_operations = [event for event in events if _is_operation(event, threads)]
    spans = list(_spans(events, host_operations, kernels))
    times: defaultdict[frozenset[str], float] = defaultdict(float)
    sent_s = []
    for mark in marks:
        within = active_times(spans, mark.time_range.start, mark.time_range.end)
        sent_us = 0.0
        for active, duration_us in within.items():
            times[active] += duration_us
            sent_us += duration_us if "sending" in active else 0.0
        sent_s.append(sent_us / 1e6)
    shares = _shares(times, share_on_device if on_device else share_on_host, len(marks))
    messages = [span for span in spans if span.activity == "sending" and _in_steps(span, marks)]
    overlapped, unused = _parts_of_passes(times)
    trace = Trace(
        file=file,
        steps=len(marks),
        on_device=on_device,
        shares=shares,
        overlapped_part=overlapped,
        unused_part=unused,
        messages=len(messages) / len(marks),
        sent_s=tuple(sent_s),
    )
    operations = kernels if on_device else host_operations
    return _with_operations(trace, [event for event in operations if _began_in(event, marks)])


def _is_on_host(event: Any) -> bool:
    return bool(event.device_type.name == "CPU")


def _is_kernel(event: Any) -> bool:
    if _is_on_host(event) or event.is_user_annotation:
        return False
    return not _SENDS.match(event.name) and not _COPIES.match(event.name)


def _is_operation(event: Any, threads: set[int]) -> bool:
    computes = _is_on_host(event) and not event.is_user_annotation and event.thread in threads
    return computes and not _NOT_COMPUTING.match(event.name)


def _in_steps(span: Span, marks: Sequence[Any]) -> bool:
    return any(mark.time_range.start <= span.begin < mark.time_range.end for mark in marks)


def _began_in(event: Any, marks: Sequence[Any]) -> bool:
    begin = event.time_range.start
    return any(mark.time_range.start <= begin < mark.time_range.end for mark in marks)


def _spans(
    events: Sequence[Any], host_operations: Sequence[Any], kernels: Sequence[Any]
) -> Iterator[Span]:
    """Yield all activities; several can be active at once."""
    work = kernels or host_operations
    begins = sorted(event.time_range.start for event in kernels)
    for event in work:
        yield Span(event.time_range.start, event.time_range.end, "work")
    for event in events:
        activity = _activity(event)
        if activity is None:
            continue
        begin, end = event.time_range.start, event.time_range.end
        if activity == "blocked":  # the device waits until the host launches new work
            launch = bisect_left(begins, end)
            end = begins[launch] if launch < len(begins) else end
            activity = "reads"
        yield Span(begin, end, activity)


def _activity(event: Any) -> str | None:
    name = event.name
    if not _is_on_host(event):
        if event.is_user_annotation:
            return "device optimizer" if name.startswith("Optimizer.step#") else None
        if _SENDS.match(name):
            return "sending"
        return "copies" if _COPIES.match(name) else None
    if name.startswith("gloo:"):
        return "sending"
    if name.startswith("muster:") and not name.startswith(_STEP):
        return str(name.removeprefix("muster:"))
    return "blocked" if _BLOCKS.match(name) else None


def active_times(spans: Sequence[Span], begin: float, end: float) -> dict[frozenset[str], float]:
    """Return the time from begin to end, by the set of activities that are active."""
    changes = [(end, 0, "")]
    for span in spans:
        since, until = max(span.begin, begin), min(span.end, end)
        if since < until:
            changes += [(since, 1, span.activity), (until, -1, span.activity)]
    changes.sort(key=lambda change: change[0])
    count: Counter[str] = Counter()
    times: defaultdict[frozenset[str], float] = defaultdict(float)
    active: frozenset[str] = frozenset()
    for moment, step, activity in changes:
        if moment > begin:
            times[active] += moment - begin
            begin = moment
        count[activity] += step
        if count[activity]:
            active |= {activity}
        else:
            active -= {activity}
    return times


def share_on_host(active: frozenset[str]) -> str:
    """Return the share of a moment on a rank that computes on the host."""
    for activity, share in _HOST_SHARES:
        if activity in active:
            return share
    if "work" in active:
        return "overlapped" if "sending" in active else "compute"
    return "exposed" if "sending" in active else "idle"


def share_on_device(active: frozenset[str]) -> str:
    """Return the share of a moment on a device; the host counts only while the device idles."""
    if "work" in active:
        if "sending" in active:
            return "overlapped"
        return "optimizer" if "device optimizer" in active else "compute"
    if "sending" in active:
        return "exposed"
    for share in ("copies", "save", "data", "reads"):
        if share in active:
            return share
    return "idle"


def _shares(
    times: Mapping[frozenset[str], float], share: Callable[[frozenset[str]], str], steps: int
) -> dict[str, float]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for active, duration_us in times.items():
        seconds[share(active)] += duration_us / 1e6 / steps
    return dict(seconds)


def _parts_of_passes(times: Mapping[frozenset[str], float]) -> tuple[float, float]:
    """Return the parts of forward and backward with communication, and without an operation.

    Waiting time is excluded.
    """
    busy = overlapped = unused = 0.0
    for active, duration_us in times.items():
        in_pass = "forward" in active or "backward" in active
        waits = "sending" in active and "work" not in active
        if not in_pass or waits or "reads" in active:
            continue
        busy += duration_us
        if "work" not in active:
            unused += duration_us
        elif "sending" in active:
            overlapped += duration_us
    return (overlapped / busy, unused / busy) if busy else (0.0, 0.0)


def _with_operations(trace: Trace, operations: Sequence[Any]) -> Trace:
    """Add the operations by time, and how small they are."""
    if not operations:
        return trace
    calls: Counter[str] = Counter()
    total_us: defaultdict[str, float] = defaultdict(float)
    durations = []
    for event in operations:
        if trace.on_device:
            duration_us = event.time_range.elapsed_us()
        else:
            duration_us = max(event.self_cpu_time_total, 0.0)
        calls[event.name] += 1
        total_us[event.name] += duration_us
        durations.append(duration_us)
    median_us = statistics.median(durations)
    small_us = sum(duration for duration in durations if duration < _SMALL_US)
    small_part = small_us / max(sum(durations), 1e-9)
    if trace.on_device:
        idle = trace.shares.get("idle", 0.0) / sum(trace.shares.values())
        launch_bound = median_us < _SMALL_US and idle >= _IDLE_FROM
    else:
        launch_bound = small_part >= _LAUNCH_BOUND_FROM
    names = sorted(total_us, key=lambda name: -total_us[name])[:_MOST_OPERATIONS]
    top = []
    for name in names:
        self_s = total_us[name] / 1e6 / trace.steps
        top.append(Operation(name=name, calls=calls[name] / trace.steps, self_s=self_s))
    return replace(
        trace,
        top=tuple(top),
        calls=len(durations) / trace.steps,
        median_s=median_us / 1e6,
        small_part=small_part,
        launch_bound=launch_bound,
    )
