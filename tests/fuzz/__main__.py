"""Fuzz one parser: ``python -m fuzz TARGET --seconds 120`` in the folder ``tests``.

Hypothesis draws inputs: random bytes, JSON, and changes of known inputs (``targets.py`` and ``corpus/TARGET/``), which
run first. ``--engine atheris`` (if it is installed) follows the coverage instead. A failure is any exception that the parser does not promise, more than 2 s for one input, or more than 256 MB. Hypothesis
shrinks the input; put it into ``corpus/TARGET/`` together with the fix.
"""

import argparse
import contextlib
import importlib
import json
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzz.targets import TARGETS, Parse, Target

CORPUS = Path(__file__).with_name("corpus")
MOST_S, MOST_WALL_S = 2.0, 60.0
MOST_BYTES = 256 * 10**6
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5)
    ),
)
ODD = (
    b"[" * 2000,
    b'{"a":' * 2000,
    b"\x00",
    b"\xff",
    b"1e999",
    b"-1",
    b"9" * 5000,
    b"\\ud800",
    b"\n",
    b'"',
    b"\x1b[2J",
    b"..",
)


class TimeIsUp(BaseException):
    """The time for this parser is over; not an error."""


class Hang(AssertionError):
    """One input took too long."""


@st.composite
def changed(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """Change a known input in some places."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(0, len(data)))
        end = min(len(data), place + draw(st.integers(0, 8)))
        piece = draw(st.sampled_from(ODD) | st.binary(max_size=4) | st.sampled_from(seeds))
        data[place:end] = piece
    return bytes(data[: 2**16])


def known_inputs(name: str, target: Target) -> tuple[bytes, ...]:
    folder = CORPUS / name
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return (*target.seeds, *(path.read_bytes() for path in files))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Tried:
    """Gives inputs to a parser and raises if it breaks a rule; counts the inputs."""

    def __init__(self, target: Target, parse: Parse, first: bytes) -> None:
        self._target, self._parse = target, parse
        self.count = 0
        self._hangs = False
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, self._on_alarm)
        with contextlib.suppress(*target.refusals):
            parse(first)  # imports modules and compiles expressions
        self._before_bytes = peak_bytes()

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        self._hangs = True
        raise Hang

    def __call__(self, data: bytes) -> None:
        self.count += 1
        signal.setitimer(signal.ITIMER_PROF, MOST_S)  # CPU time: other processes do not count
        signal.setitimer(signal.ITIMER_REAL, MOST_WALL_S)
        try:
            self._parse(data)
        except self._target.refusals:
            pass
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        if self._hangs:  # also if the parser caught the exception
            self._hangs = False
            raise Hang(f"more than {MOST_S:g} s of CPU time, or {MOST_WALL_S:g} s, for one input")
        grown = peak_bytes() - self._before_bytes
        assert grown < MOST_BYTES, f"{grown / 1e6:.0f} MB more memory"


def fuzz(name: str, seconds: float, number: int) -> tuple[int, float]:
    """Return the number of inputs that were tried, and how long it took."""
    target = TARGETS[name]
    known = known_inputs(name, target)
    with target.opened() as parse:
        tried = Tried(target, parse, known[0])
        began = time.monotonic()
        for data in (*known, *ODD, b""):
            tried(data)

        def one(data: bytes) -> None:
            if time.monotonic() - began > seconds:
                raise TimeIsUp
            tried(data)

        inputs = changed(known) | JSON.map(lambda value: json.dumps(value).encode())
        inputs |= st.binary(max_size=300)
        limits = settings(
            max_examples=2000,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        with contextlib.suppress(TimeIsUp):
            while True:
                number += 1
                seed(number)(limits(given(inputs)(one)))()
        return tried.count, time.monotonic() - began


def fuzz_by_coverage(name: str, seconds: float) -> None:
    """Fuzz with atheris, which changes inputs by what code they reach; ends the process."""
    atheris = importlib.import_module("atheris")  # it is not among the packages for development

    target = TARGETS[name]
    known = known_inputs(name, target)
    with atheris.instrument_imports(include=["torchmuster"]), target.opened() as parse:
        tried = Tried(target, parse, known[0])
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        for place, data in enumerate((*known, *ODD)):
            (folder / str(place)).write_bytes(data)
        words = [sys.argv[0], str(folder), f"-max_total_time={seconds:.0f}", "-max_len=65536"]
        atheris.Setup([*words, "-print_final_stats=1"], tried)
        atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=["hypothesis", "atheris"], default="hypothesis")
    options = parser.parse_args()
    for name in TARGETS if options.target == "all" else [options.target]:
        if options.engine == "atheris":
            fuzz_by_coverage(name, options.seconds)
        count, took_s = fuzz(name, options.seconds, options.seed)
        print(f"{name}: {count} inputs, {count / took_s:.0f} per second, no failure", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
