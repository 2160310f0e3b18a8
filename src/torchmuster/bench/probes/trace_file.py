"""Profile selected steps into a trace file; a test step before them determines its size."""

import gzip
import shutil
import tempfile
import warnings
from pathlib import Path

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from torchmuster.bench.profile.recording import ProfileRequest, TraceKept
from torchmuster.units import format_bytes


class TraceFile:
    """Selects the steps to trace, and writes their trace as ``rank-N.trace.json.gz``.

    A step before the first requested one is traced and discarded: it includes the one-time work of
    the profiler, and its size determines how many steps fit into the limit. Between the two is a
    step without the profiler: it is stopped inside ``optimizer.step``, which is a range of the
    profiler itself; a second profiler started before this range ends would receive its end, and
    write it into memory of the first one (torch 2.13 crashes then).
    """

    def __init__(self, asked: ProfileRequest, rank: int) -> None:
        self._asked = asked
        self._rank = rank
        self._wanted = asked.traces and (asked.on_ranks is None or rank in asked.on_ranks)
        self._sizing = asked.first_step - 2
        self._last = asked.last_step
        self._why_cut = ""
        self._running: profile | None = None
        self._mark: record_function | None = None
        self._kept: profile | None = None
        self._ended = 0

    def before(self, step: int) -> bool:
        """Start the profiler if it is due in a step; return whether it runs."""
        asked = self._asked
        if not self._wanted or not (step == self._sizing or asked.first_step <= step <= self._last):
            return False
        if self._running is None:
            self._running = profile(activities=_activities(), profile_memory=asked.with_memory)
            with warnings.catch_warnings():
                # torch 2.12 warns that a second start clears events; with acc_events=True it would
                # not, but
                # would process all events at the end of a step.
                warnings.filterwarnings("ignore", "Warning: Profiler clears events")
                self._running.start()
        self._mark = record_function(f"muster:step#{step}")
        self._mark.__enter__()  # type: ignore[no-untyped-call]
        return True

    def after(self, step: int) -> None:
        """Stop the profiler if its steps are over."""
        if self._running is None or self._mark is None:
            return
        self._mark.__exit__(None, None, None)
        self._mark = None
        if step == self._sizing:
            self._running.stop()
            self._make_room(_size_bytes(self._running))
            self._running = None
        elif step == self._last:
            self._stop(step)

    def _stop(self, step: int) -> None:
        if self._running is not None:
            self._running.stop()
            self._kept, self._running, self._ended = self._running, None, step

    def _make_room(self, of_a_step_bytes: int) -> None:
        most = self._asked.trace_most_bytes
        steps = self._last - self._asked.first_step + 1
        room = max(1, most // max(1, of_a_step_bytes))
        if room < steps:
            self._last = self._asked.first_step + room - 1
            self._why_cut = (
                f"the trace of a step takes {format_bytes(of_a_step_bytes)}, the limit is "
                f"{format_bytes(most)}: "
                f"{room} of {steps} steps were recorded"
            )

    def write(self, step: int) -> TraceKept | None:
        """Write the trace up to a step; None if nothing was traced."""
        self._stop(step)
        if self._kept is None:
            return None
        path = Path(self._asked.into) / f"rank-{self._rank}.trace.json.gz"
        with tempfile.TemporaryDirectory(dir=self._asked.into) as place:
            plain = Path(place) / "trace.json"
            self._kept.export_chrome_trace(str(plain))
            size_bytes = plain.stat().st_size
            # "x": do not overwrite an existing trace.
            with plain.open("rb") as source, gzip.open(path, "xb", compresslevel=4) as target:
                shutil.copyfileobj(source, target)
        return TraceKept(
            file=path.name,
            size_bytes=size_bytes,
            first_step=self._asked.first_step,
            last_step=self._ended,
            why_cut=self._why_cut,
        )


def _activities() -> list[ProfilerActivity]:
    found = [ProfilerActivity.CPU]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        for one in ("CUDA", "XPU", "MTIA"):
            if accelerator.type == one.lower() and hasattr(ProfilerActivity, one):
                found.append(getattr(ProfilerActivity, one))
    return found


def _size_bytes(traced: profile) -> int:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "trace.json"
        traced.export_chrome_trace(str(path))
        return path.stat().st_size
