"""Run a lab's tests on the learner's file, and name the mistakes; without torch.

Each exercise runs on ranks of its own (``testing.py``), which have a deadline.
"""

import re
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec

from torchmuster.finding import Finding, Status
from torchmuster.labs.lesson import Exercise, Lesson
from torchmuster.launch import forked_ranks
from torchmuster.launch.forked_ranks import RankProgram

DEADLINE_S = 30.0  # of an exercise; the longest solution needs a twentieth of it
# For the other ranks after the first has finished: this share of the deadline, as tests take about equally long on
# each rank; if the first rank reports a mistake, only long enough to get the same report.
_AFTER_THE_FIRST = 0.3
_AFTER_A_MISTAKE_S = 1.0
_LOOK_EVERY_S = 0.01
_STACKS_WITHIN_S = 0.3
_PRINTED_LINES = 6
_PRELOADED = ("torchmuster.labs.testing",)
# From most informative to consequential; named mistakes of a lab come before all of these.
_CONSEQUENCES = (
    "not-done",
    "missing",
    "ended",
    "died",
    "raised",
    "hangs",
    "wrong-value",
    "waits",
    "",
)
_TORCHS_OWN = re.compile(r"frame #|\[[A-Z]\d{3}|\[rank\d|\[/\S*\.cc:|Exception raised from|\s*$")


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an exercise, on one rank or on all: the name of the mistake (none if correct), and the evidence."""

    exercise: str
    mistake: str = ""
    seen: str = ""


def grade(
    lesson: Lesson,
    file: Path,
    exercises: Sequence[str],
    *,
    tests: Path | None = None,
    deadline_s: float = DEADLINE_S,
) -> tuple[Verdict, ...]:
    """Return a verdict on each of these exercises in the learner's file."""
    # On the CPU, so that a file gets the same points on every host.
    forked_ranks.start_server(_PRELOADED, {"CUDA_VISIBLE_DEVICES": ""})
    verdicts = []
    for name in exercises:
        with tempfile.TemporaryDirectory(prefix="muster-lab-") as folder:
            grading = _Grading(lesson.exercise(name), file.resolve(), Path(folder), deadline_s)
            verdicts.append(grading.run(tests or lesson.tests))
    return tuple(verdicts)


def points(lesson: Lesson, verdicts: Sequence[Verdict]) -> int:
    """Return the points of the verdicts."""
    correct = [verdict for verdict in verdicts if not verdict.mistake]
    return sum(lesson.exercise(verdict.exercise).points for verdict in correct)


def mistake_finding(lesson: Lesson, verdict: Verdict) -> Finding:
    """Return a verdict as a finding."""
    exercise = lesson.exercise(verdict.exercise)
    if not verdict.mistake:
        what = f"{exercise.name} ({exercise.points} of {exercise.points} points)"
        return Finding(name=exercise.name, status=Status.OK, what=what)
    hint = lesson.hints[verdict.mistake]
    status = Status.FAILURE
    if verdict.mistake == "not-done":
        status = Status.NOTE
    return Finding(
        name=verdict.mistake,
        status=status,
        what=f"{exercise.name} (0 of {exercise.points} points): {hint.what}",
        why=hint.why,
        fix=hint.fix,
        evidence=verdict.seen,
    )


class _Grading:
    """One exercise on its ranks: each rank writes its verdict into ``folder``, and is then killed."""

    def __init__(self, exercise: Exercise, file: Path, folder: Path, deadline_s: float) -> None:
        self._exercise, self._file, self._folder = exercise, file, folder
        self._deadline_s = deadline_s
        self._verdicts: dict[int, Verdict] = {}  # by rank

    def run(self, tests: Path) -> Verdict:
        """Return the most informative verdict of a rank; a named mistake comes before its consequences."""
        scratch = self._folder / "scratch"
        scratch.mkdir()
        for rank in range(self._exercise.ranks):
            (
                self._folder / f"rank-{rank}.log"
            ).touch()  # it may be killed before it has opened them
            (self._folder / f"stack-{rank}.txt").touch()
        program = RankProgram(
            function=_run_exercise,
            arguments=(self._exercise, tests, self._file, self._folder),
            ranks=self._exercise.ranks,
            folder=scratch,
            logs=self._folder,
            environment={},
        )
        with forked_ranks.started(program) as processes:
            self._wait(processes)
            self._find_hanging(processes)
        rank = min(sorted(self._verdicts), key=self._order)
        verdict = self._verdicts[rank]
        if not verdict.mistake:
            return verdict
        return msgspec.structs.replace(verdict, seen=f"{verdict.seen}{self._printed(rank)}".strip())

    def _wait(self, processes: Sequence[BaseProcess]) -> None:
        """Wait until each rank has a verdict, or until the deadline."""
        end_s = time.monotonic() + self._deadline_s
        while len(self._verdicts) < len(processes) and time.monotonic() < end_s:
            for rank, process in enumerate(processes):
                if rank in self._verdicts:
                    continue
                alive = (
                    process.is_alive()
                )  # before reading: it may write its file and die in between
                file = self._folder / f"verdict-{rank}.json"
                if file.exists():
                    verdict = msgspec.json.decode(file.read_bytes(), type=Verdict)
                elif alive:
                    continue
                else:
                    verdict = self._verdict(
                        "died", f"rank {rank}: {forked_ranks.end_text(process)}"
                    )
                self._verdicts[rank] = verdict
                patience_s = self._deadline_s * _AFTER_THE_FIRST
                if verdict.mistake not in ("", "wrong-value"):
                    patience_s = _AFTER_A_MISTAKE_S
                end_s = min(end_s, time.monotonic() + patience_s)
            time.sleep(_LOOK_EVERY_S)

    def _find_hanging(self, processes: Sequence[BaseProcess]) -> None:
        """Add a verdict for each rank that has none, with the line where it is."""
        hanging = [rank for rank in range(len(processes)) if rank not in self._verdicts]
        if not hanging:
            return
        for rank in hanging:
            forked_ranks.send_signal(processes[rank], signal.SIGUSR1)  # it writes its stack
        time.sleep(_STACKS_WITHIN_S)
        finished = ""
        has_mistake = False
        for rank, verdict in sorted(self._verdicts.items()):
            finished += f"; rank {rank} has finished {verdict.seen}"
            has_mistake = has_mistake or bool(verdict.mistake)
        line = re.compile(rf'File "{re.escape(str(self._file))}", line (\d+) in (\S+)')
        for rank in hanging:
            stack = self._folder / f"stack-{rank}.txt"
            match = line.search(stack.read_text(encoding="utf-8", errors="replace"))  # innermost
            mistake, where = "hangs", "running"
            if match is not None:
                where = f"at {self._file.name}:{match[1]}, in {match[2]}"
            elif has_mistake:  # it waits in the test for a rank with a mistake
                mistake = "waits"
            self._verdicts[rank] = self._verdict(mistake, f"rank {rank} is still {where}{finished}")

    def _verdict(self, mistake: str, seen: str) -> Verdict:
        return Verdict(exercise=self._exercise.name, mistake=mistake, seen=seen)

    def _order(self, rank: int) -> int:
        mistake = self._verdicts[rank].mistake
        if mistake in _CONSEQUENCES:
            return _CONSEQUENCES.index(mistake)
        return -1

    def _printed(self, rank: int) -> str:
        """Return what a rank printed, as learners debug by printing; each line begins with a newline."""
        log = self._folder / f"rank-{rank}.log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        printed = [line for line in lines if not _TORCHS_OWN.match(line)]
        return "".join(f"\nrank {rank} printed: {line}" for line in printed[-_PRINTED_LINES:])


def _run_exercise(rank: int, exercise: Exercise, tests: Path, file: Path, folder: Path) -> None:
    from torchmuster.labs.testing import run_exercise

    run_exercise(rank, exercise, tests, file, folder)
