"""Profile the requested steps with torch.profiler, and say what they did and where a device's time went.

The events are read in the process from ``profile.events()``; the trace file is for people, who open
it in Perfetto.
"""

import gzip
import re
import shutil
import tempfile
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from torchmuster.profile.facts import Operation, ProfileRequest, Trace

_MOST_OPERATIONS = 12
_MARK = "muster:"
_STEP = "muster:step#"
_BACKWARD = "autograd::engine::evaluate_function"
# As in HolisticTraceAnalysis: parts of kernel names for communication and memory copies.
_SENDS = re.compile(r"^(?:nccl|rccl|mscclpp)|.*(nccl|rccl)(?:Dev)?Kernel", re.IGNORECASE)
_COPIES = re.compile(r"^(Memcpy|Memset)|^dma", re.IGNORECASE)
_BLOCKS = re.compile(r"^(cuda|hip)(Stream|Device|Event)Synchronize$|^(cuda|hip)Memcpy$")
_NOT_COMPUTING = re.compile(r"^(c10d::|record_param_comms|cuda|hip|cu[A-Z])")


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
        self._wanted = request.traces
        self._first, self._last = request.first_step, request.last_step
        self._path = Path(request.into) / f"rank-{rank}.trace.json.gz"
        self._profile: profile | None = None
        self._running = ExitStack()
        self._mark = ExitStack()

    def before(self, step: int) -> bool:
        """Start the profiler if it is due in a step; return whether it runs."""
        if not self._wanted or not self._first - 1 <= step <= self._last:
            return False
        if self._profile is None:
            self._profile = self._running.enter_context(profile(activities=_activities()))
        if step >= self._first:
            self._mark.enter_context(record_function(f"{_STEP}{step}"))
        return True

    def after(self, step: int) -> None:
        """End the mark of a step, and the profiler after the last one."""
        self._mark.close()
        if step == self._last:
            self._running.close()

    def write(self) -> Trace | None:
        """Write the trace, and return what it shows; None if nothing was traced."""
        self._running.close()
        if self._profile is None:
            return None
        with tempfile.TemporaryDirectory(dir=self._path.parent) as folder:
            plain = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(plain))
            # "x": do not overwrite an existing trace.
            with plain.open("rb") as source, gzip.open(self._path, "xb", compresslevel=4) as target:
                shutil.copyfileobj(source, target)
        return summarize(self._profile.events() or [])  # type: ignore[no-untyped-call]


def _activities() -> list[ProfilerActivity]:
    activities = [ProfilerActivity.CPU]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and hasattr(ProfilerActivity, accelerator.type.upper()):
        activities.append(getattr(ProfilerActivity, accelerator.type.upper()))
    return activities


def summarize(events: Sequence[Any]) -> Trace | None:
    """Return what the profiler's events show of the marked steps; None without a marked step."""
    marks = [event for event in events if event.name.startswith(_STEP) and _is_on_host(event)]
    if not marks:
        return None
    marks.sort(key=lambda mark: mark.time_range.start)
    begins = [mark.time_range.start for mark in marks]
    in_steps = []
    for event in events:
        step = bisect_right(begins, event.time_range.start) - 1
        if step >= 0 and event.time_range.start < marks[step].time_range.end:
            in_steps.append(event)
    messages = sum(_activity(event) == "sending" for event in in_steps) / len(marks)
    kernels = [event for event in in_steps if _is_kernel(event)]
    if kernels:
        shares, sent_s = _device_times(events, marks)
        durations = [(event.name, event.time_range.elapsed_us()) for event in kernels]
        return Trace(
            steps=len(marks),
            shares=shares,
            sent_s=sent_s,
            messages=messages,
            top=_longest(durations, len(marks)),
        )
    threads = {marks[0].thread}
    threads.update(event.thread for event in in_steps if event.name.startswith(_BACKWARD))
    durations = []
    for event in in_steps:
        if _computes(event) and event.thread in threads:
            durations.append((event.name, max(event.self_cpu_time_total, 0.0)))
    return Trace(steps=len(marks), messages=messages, top=_longest(durations, len(marks)))


def _longest(durations: Sequence[tuple[str, float]], steps: int) -> tuple[Operation, ...]:
    """Return the operations that take longest, from the microseconds of each call."""
    calls: Counter[str] = Counter()
    total_us: Counter[str] = Counter()
    for name, duration_us in durations:
        calls[name] += 1
        total_us[name] += duration_us  # type: ignore[assignment]  # a Counter also adds floats
    longest = []
    for name, self_us in total_us.most_common(_MOST_OPERATIONS):
        self_s = self_us / 1e6 / steps
        longest.append(Operation(name=name, calls=calls[name] / steps, self_s=self_s))
    return tuple(longest)


def _is_on_host(event: Any) -> bool:
    return bool(event.device_type.name == "CPU")


def _is_kernel(event: Any) -> bool:
    return _activity(event) == "work"


def _computes(event: Any) -> bool:
    is_operation = _is_on_host(event) and not event.is_user_annotation
    return is_operation and not _NOT_COMPUTING.match(event.name)


def _activity(event: Any) -> str | None:
    """Return what an event shows: ``work`` of a device, ``sending``, ``blocked`` or a marked phase."""
    name = event.name
    if not _is_on_host(event):
        if event.is_user_annotation:
            return "device optimizer" if name.startswith("Optimizer.step#") else None
        if _SENDS.match(name):
            return "sending"
        return "copies" if _COPIES.match(name) else "work"
    if name.startswith("gloo:"):
        return "sending"
    if name.startswith(_MARK) and not name.startswith(_STEP):
        return str(name.removeprefix(_MARK))
    return "blocked" if _BLOCKS.match(name) else None


def _device_times(
    events: Sequence[Any], marks: Sequence[Any]
) -> tuple[dict[str, float], tuple[float, ...]]:
    """Return the seconds of a step by share, and those with a collective by step."""
    spans = []
    begins = sorted(event.time_range.start for event in events if _is_kernel(event))
    for event in events:
        activity, end = _activity(event), event.time_range.end
        if activity == "blocked":  # the device waits until the host launches new work
            launch = bisect_left(begins, end)
            end = begins[launch] if launch < len(begins) else end
            activity = "reads"
        if activity is not None:
            spans.append(Span(event.time_range.start, end, activity))
    shares: defaultdict[str, float] = defaultdict(float)
    sent_s = []
    for mark in marks:
        sent_us = 0.0
        for active, moment_us in _moments(spans, mark.time_range.start, mark.time_range.end):
            shares[_share(active)] += moment_us / 1e6 / len(marks)
            sent_us += moment_us if "sending" in active else 0.0
        sent_s.append(sent_us / 1e6)
    return dict(shares), tuple(sent_s)


def _moments(
    spans: Sequence[Span], begin: float, end: float
) -> Iterator[tuple[frozenset[str], float]]:
    """Yield the moments from begin to end: the active activities, and how long."""
    changes = [(end, 0, "")]
    for span in spans:
        since, until = max(span.begin, begin), min(span.end, end)
        if since < until:
            changes += [(since, 1, span.activity), (until, -1, span.activity)]
    active: Counter[str] = Counter()
    for moment, change, activity in sorted(changes):
        if moment > begin:
            yield frozenset(name for name, count in active.items() if count), moment - begin
            begin = moment
        active[activity] += change


def _share(active: frozenset[str]) -> str:
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
