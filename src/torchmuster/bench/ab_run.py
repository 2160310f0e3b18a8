"""Runs pairs of ``muster bench`` commands side by side with interleaved samples."""

import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torchmuster.bench.interleaved import SIDES, VARIABLE, Referee
from torchmuster.bench.record import FILE
from torchmuster.errors import Impossible, MusterError

_SPEAK_EVERY_S = 8.0
_LAST_LINES = 12


@dataclass(frozen=True)
class AbCommand:
    """The command of one side: program, arguments and added environment variables."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def parse_commands(text: str) -> AbCommand:
    """Parse a command line with optional ``NAME=VALUE`` prefixes, without a shell."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise Impossible(
            f"cannot parse the command {text}", why=str(error), fix="close the quote: ' or \""
        ) from error
    environment = {}
    while words and words[0].partition("=")[0].isidentifier() and "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if not words or any(one.partition("=")[0] == "--out" for one in words):
        raise Impossible(
            f"cannot measure with the command {text or repr(text)}",
            why="it contains --out, which is set for each pair" if words else "it is empty",
            fix='omit --out, as in "muster bench matmul --sizes 512"',
        )
    return AbCommand(words=tuple(words), environment=environment)


def measure_pairs(
    commands: Mapping[str, AbCommand], folder: Path, *, pairs: int, say: Callable[[str], None]
) -> None:
    """Measure both sides ``pairs`` times, into ``before`` and ``after`` of a folder.

    Each command gets ``--out`` with its own folder, where it must write a record. Existing pairs
    are not repeated.
    """
    for side in SIDES:
        (folder / side).mkdir(parents=True, exist_ok=True)
    begun, done = time.monotonic(), 0
    for number in range(1, pairs + 1):
        places = {side: folder / side / str(number) for side in SIDES}
        if all((place / FILE).exists() for place in places.values()):
            continue
        left = (
            f", about {(time.monotonic() - begun) / done * (pairs - number + 1):.0f} s left"
            if done
            else ""
        )
        say(f"pair {number} of {pairs}{left}")
        _measure_pair(commands, places, seed=number, say=say)
        done += 1


def _measure_pair(
    commands: Mapping[str, AbCommand],
    places: Mapping[str, Path],
    *,
    seed: int,
    say: Callable[[str], None],
) -> None:
    with Referee(seed) as referee, _started(commands, places, referee) as processes:
        waiting = [
            threading.Thread(target=_await_end, args=(side, process, referee), daemon=True)
            for side, process in processes.items()
        ]
        for thread in waiting:
            thread.start()
        while any(thread.is_alive() for thread in waiting):
            for thread in waiting:
                thread.join(_SPEAK_EVERY_S / len(waiting))
            if any(thread.is_alive() for thread in waiting):
                taken = min(referee.taken.values())
                say(
                    f"{taken} interleaved samples of each side"
                    if taken
                    else "both sides are starting and warming up"
                )
    for side, place in places.items():
        if not (place / FILE).exists():
            raise MusterError(
                f"{shlex.join(commands[side].words)} wrote no record",
                why=_last_lines(_log(place))
                or f"it exited with {processes[side].returncode} without output",
                fix="run it alone; both commands must be muster bench commands",
            )
    if len({*referee.taken.values()}) > 1 or not min(referee.taken.values()):
        raise Impossible(
            "the samples of the two commands cannot be interleaved",
            why=f"they took {referee.taken['before']} and {referee.taken['after']} samples",
            fix="pass two commands that measure the same things",
        )


def _await_end(side: str, process: "subprocess.Popen[bytes]", referee: Referee) -> None:
    process.wait()
    referee.has_ended(side)


@contextmanager
def _started(
    commands: Mapping[str, AbCommand], places: Mapping[str, Path], referee: Referee
) -> Iterator[dict[str, "subprocess.Popen[bytes]"]]:
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for side, command in commands.items():
            with _log(places[side]).open("wb") as log:
                processes[side] = _start(command, places[side], referee.paths[side], log.fileno())
        yield processes
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.terminate()
                process.wait()


def _start(command: AbCommand, place: Path, turns: Path, log: int) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, **command.environment, VARIABLE: str(turns)}
    words = [*command.words, "--out", str(place)]
    try:
        return subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    except OSError as error:
        raise Impossible(
            f"cannot start {command.words[0]}",
            why=error.strerror or str(error),
            fix="pass a command as you would type it: muster bench …",
        ) from error


def _log(place: Path) -> Path:
    return place.with_name(f"{place.name}.log")


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
