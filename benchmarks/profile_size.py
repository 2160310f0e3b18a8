"""Measure time and memory of the analysis of large traces.

    muster profile --ranks 2 tests/slow_scripts/healthy.py     # leaves profile/<date>-<time>
    python benchmarks/profile_size.py profile/<date>-<time> --out docs/measured/profile-size.md

The events of a recorded trace are repeated, with shifted times, to make one trace of 2 GB and traces of 32 MB for 64 ranks. A separate
process analyzes each folder; its peak resident memory is read at its end.
"""

import argparse
import dataclasses
import gzip
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchmuster.bench.profile.recording import RankFacts, TraceKept, read_facts, write_facts

_STEPS = 16  # of each trace that is made
_ANALYSE = """
import json, resource, sys, time
from pathlib import Path
from torchmuster.bench.profile.advice import advise
from torchmuster.bench.profile.analysis import analyse_profile
from torchmuster.bench.report.profile import profile_page
from torchmuster.bench.report.profile import profile_screen

resting = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
begun = time.monotonic()
said = []
found = analyse_profile(Path(sys.argv[1]), say=said.append)
advice = advise(found)
text, whole = profile_screen(found, advice, None, Path(sys.argv[1])), profile_page(found, advice, None)
print(json.dumps({
    "seconds": time.monotonic() - begun,
    "cpu_seconds": time.process_time(),
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "resting_bytes": resting,
    "events": sum(one.trace.events for one in found.ranks),
    "steps": sum(len(one.trace.steps) for one in found.ranks),
    "left_out": sum(len(one.trace.left_out) for one in found.ranks),
    "said": len(said),
    "page_bytes": len(whole),
    "lines": text.count(chr(10)) + 1,
}))
"""


def events_of(folder: Path, facts: RankFacts) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a recorded trace: what it says before its events, and its events without the marks of steps."""
    assert facts.trace is not None
    with gzip.open(folder / facts.trace.file, "rt") as file:
        trace = json.load(file)
    events = [
        one
        for one in trace.pop("traceEvents")
        if one["ph"] in "Xi" and isinstance(one["pid"], int) and "step#" not in one["name"]
    ]
    return trace, events


class Repeated:
    """Events as text, in which only the time is left open."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.begin = min(one["ts"] for one in events)
        self.length = max(one["ts"] + one.get("dur", 0.0) for one in events) - self.begin + 10.0
        self.thread, self.process = events[0]["tid"], events[0]["pid"]
        marks = [one for one in events if one["name"].startswith("muster:")]
        self.thread = marks[0]["tid"] if marks else self.thread
        self._parts = []
        for one in events:
            text = json.dumps(one, indent=2)  # as wide as the profiler writes it
            before, after = re.split(r'"ts": [0-9.]+', text, maxsplit=1)
            self._parts.append((before + '"ts": ', one["ts"] - self.begin, after))
        self.size_bytes = len(self.text(0))

    def text(self, number: int) -> str:
        """Return all events once more, after so many times that they were there before."""
        at = self.begin + number * self.length
        return ",\n".join(f"{first}{at + ts:.3f}{last}" for first, ts, last in self._parts)

    def mark(self, step: int, first: int, last: int) -> str:
        """Return the mark of a step that holds the repetitions from the first up to the last."""
        return json.dumps(
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"muster:step#{step}",
                "pid": self.process,
                "tid": self.thread,
                "ts": round(self.begin + first * self.length, 3),
                "dur": round((last - first) * self.length - 1.0, 3),
            }
        )


def pieces(header: dict[str, Any], repeated: Repeated, size_bytes: int) -> Iterator[str]:
    """Give the text of a trace of about this size."""
    each = max(round(size_bytes / repeated.size_bytes / _STEPS), 1)
    yield json.dumps(header)[:-1] + ', "traceEvents": [\n'
    for step in range(_STEPS):
        for number in range(step * each, (step + 1) * each):
            yield repeated.text(number) + ",\n"
        mark = repeated.mark(step + 20, step * each, (step + 1) * each)
        yield mark + ("\n" if step == _STEPS - 1 else ",\n")
    yield "]}\n"


def made(
    folder: Path,
    facts: RankFacts,
    source: tuple[dict[str, Any], Repeated],
    size_bytes: int,
    packed: bool,
) -> int:
    """Write the trace and the facts of a rank; return the size of the trace before it is packed."""
    name = f"rank-{facts.rank}.trace.json" + (".gz" if packed else "")
    path, written = folder / name, 0
    with gzip.open(path, "wt", compresslevel=1) if packed else path.open("w") as file:
        for text in pieces(*source, size_bytes):
            written += len(text)
            file.write(text)
    kept = TraceKept(
        file=name, size_bytes=path.stat().st_size, first_step=20, last_step=20 + _STEPS - 1
    )
    write_facts(folder, dataclasses.replace(facts, trace=kept))
    return written


def analysed(folder: Path) -> dict[str, float]:
    """Analyse a folder in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _ANALYSE, str(folder)], check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Make the traces, analyse them, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("profile", type=Path, help="a folder that muster profile has left")
    parser.add_argument("--one-bytes", type=float, default=2e9)
    parser.add_argument("--rank-bytes", type=float, default=32e6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    facts = read_facts(options.profile)[0]
    header, events = events_of(options.profile, facts)
    source = header, Repeated(events)
    rows = []
    for title, ranks, size, packed in (
        ("one rank, uncompressed", 1, options.one_bytes, False),
        ("one rank, compressed", 1, options.one_bytes, True),
        ("64 ranks, compressed", 64, options.rank_bytes, True),
    ):
        with tempfile.TemporaryDirectory(prefix="profile-size-") as place:
            folder = Path(place)
            written = made(
                folder, dataclasses.replace(facts, ranks=ranks, rank=0), source, size, packed
            )
            for rank in range(1, ranks):
                shutil.copyfile(
                    folder / "rank-0.trace.json.gz", folder / f"rank-{rank}.trace.json.gz"
                )
                trace = read_facts(folder)[0].trace
                assert trace is not None
                trace = dataclasses.replace(trace, file=f"rank-{rank}.trace.json.gz")
                write_facts(folder, dataclasses.replace(facts, ranks=ranks, rank=rank, trace=trace))
            on_disk = sum(path.stat().st_size for path in folder.glob("*.trace.json*"))
            found = analysed(folder)
        rows.append(
            f"| {title} | {written * ranks / 1e9:.2f} GB | {on_disk / 1e9:.2f} GB | {found['events'] / 1e6:.1f} million | "
            f"{found['steps']} of {found['steps'] + found['left_out']} | {found['seconds']:.0f} s | {found['cpu_seconds']:.0f} s | "
            f"{found['peak_bytes'] / 1e6:.0f} MB | {found['page_bytes'] / 1e6:.2f} MB |"
        )
        print(rows[-1], flush=True)
    text = "\n".join([*_HEAD.strip().splitlines(), *rows, "", *_TAIL.strip().splitlines(), ""])
    if options.out:
        options.out.write_text(text)


_HEAD = """
# `muster profile`: analysis of large traces

The table shows the time and memory that `muster profile` needs in one process to analyze large traces, print the output and write the page. *Memory*
is the peak of resident memory, *CPU time* the CPU time of the process. The events come from a real run, repeated with shifted times. Written by
`benchmarks/profile_size.py`.

| traces | size | on disk | events | steps analyzed | time | CPU time | memory | page |
|---|---|---|---|---|---|---|---|---|
"""
_TAIL = """
The reader reads a trace in pieces of 4 MiB and keeps the begin and end times of at most three million events. If there are more, it drops the last
steps, or the second half of a single step, and the report says so.
"""


if __name__ == "__main__":
    main()
