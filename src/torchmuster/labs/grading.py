"""Run a lab's tests on the learner's file, and name the mistakes; without torch.

Each exercise runs on ranks of its own (``testing.py``), which have a deadline.
"""

import os
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec

from torchmuster.finding import Finding, Status
from torchmuster.labs.lesson import Lesson
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
)
_TORCHS_OWN = re.compile(r"frame #|\[[A-Z]\d{3}|\[rank\d|\[/\S*\.cc:|Exception raised from|\s*$")


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an exercise, on one rank or on all: the name of the mistake (none if correct), and the evidence."""

    exercise: str
    mistake: str = ""
    seen: str = ""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One exercise, as its ranks get it."""

    tests: str  # the file with the tests
    exercise: str
    file: str  # of the learner
    folder: str  # for results
    ranks: int
    joined: bool


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
        exercise = lesson.exercise(name)
        with tempfile.TemporaryDirectory(prefix="muster-lab-") as folder:
            task = Task(
                tests=str(tests or lesson.tests),
                exercise=name,
                file=str(file.resolve()),
                folder=folder,
                ranks=exercise.ranks,
                joined=exercise.joined and exercise.ranks > 1,
            )
            verdicts.append(_most_informative(_run(task, deadline_s)))
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
    hint = lesson.hint(verdict.mistake)
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


def _be_learner(rank: int, task: Task) -> None:
    from torchmuster.labs.testing import run_exercise

    run_exercise(rank, task)


def _run(task: Task, deadline_s: float) -> list[Verdict]:
    """Run one exercise; ranks beyond the deadline are killed, and count as hanging."""
    folder = Path(task.folder)
    (folder / "scratch").mkdir()
    for rank in range(task.ranks):
        (folder / f"rank-{rank}.log").touch()  # it may be killed before it has opened them
        (folder / f"stack-{rank}.txt").touch()
    program = RankProgram(
        function=_be_learner,
        arguments=(task,),
        ranks=task.ranks,
        folder=folder / "scratch",
        logs=folder,
        environment={},
    )
    with forked_ranks.started(program) as processes:
        outcomes = _wait(processes, task, deadline_s)
        outcomes |= _hanging(processes, outcomes, task)
    return [
        _with_output(outcomes[rank], folder / f"rank-{rank}.log", rank) for rank in sorted(outcomes)
    ]


def _wait(processes: Sequence[BaseProcess], task: Task, deadline_s: float) -> dict[int, Verdict]:
    """Wait until each rank has a result, or until the deadline."""
    end_s = time.monotonic() + deadline_s
    outcomes: dict[int, Verdict] = {}
    while len(outcomes) < len(processes) and time.monotonic() < end_s:
        for rank, process in enumerate(processes):
            if rank in outcomes:
                continue
            alive = process.is_alive()  # before reading: it may write its file and die in between
            file = Path(task.folder) / f"outcome-{rank}.json"
            if file.exists():
                outcome = msgspec.json.decode(file.read_bytes(), type=Verdict)
            elif alive:
                continue
            else:
                seen = f"rank {rank}: {forked_ranks.end_text(process)}"
                outcome = Verdict(exercise=task.exercise, mistake="died", seen=seen)
            outcomes[rank] = outcome
            patience_s = deadline_s * _AFTER_THE_FIRST
            if outcome.mistake not in ("", "wrong-value"):
                patience_s = _AFTER_A_MISTAKE_S
            end_s = min(end_s, time.monotonic() + patience_s)
        time.sleep(_LOOK_EVERY_S)
    return outcomes


def _hanging(
    processes: Sequence[BaseProcess], outcomes: dict[int, Verdict], task: Task
) -> dict[int, Verdict]:
    """Return outcomes for the ranks without a result, with the line where each one is."""
    ranks = [rank for rank in range(task.ranks) if rank not in outcomes]
    for rank in ranks:
        os.kill(processes[rank].pid or 0, signal.SIGUSR1)  # it writes its stack
    if ranks:
        time.sleep(_STACKS_WITHIN_S)
    finished = ""
    for rank, outcome in sorted(outcomes.items()):
        finished += f"; rank {rank} has finished {outcome.seen}"
    has_mistake = any(outcome.mistake for outcome in outcomes.values())
    file = Path(task.file)
    line = re.compile(rf'File "{re.escape(str(file))}", line (\d+) in (\S+)')  # the innermost
    found = {}
    for rank in ranks:
        stack = Path(task.folder, f"stack-{rank}.txt")
        match = line.search(stack.read_text(encoding="utf-8", errors="replace"))
        mistake, where = "hangs", "running"
        if match is not None:
            where = f"at {file.name}:{match[1]}, in {match[2]}"
        elif has_mistake:  # it waits in the test for a rank with a mistake
            mistake = "waits"
        seen = f"rank {rank} is still {where}{finished}".strip()
        found[rank] = Verdict(exercise=task.exercise, mistake=mistake, seen=seen)
    return found


def _most_informative(outcomes: Sequence[Verdict]) -> Verdict:
    """Return a named mistake before its consequences, and any mistake before success."""

    def order(outcome: Verdict) -> int:
        if not outcome.mistake:
            return len(_CONSEQUENCES)
        if outcome.mistake in _CONSEQUENCES:
            return _CONSEQUENCES.index(outcome.mistake)
        return -1

    return min(outcomes, key=order)


def _with_output(outcome: Verdict, log: Path, rank: int) -> Verdict:
    """Append what a rank printed, if there is a mistake: learners debug by printing."""
    if not outcome.mistake:
        return outcome
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    printed = [line for line in lines if not _TORCHS_OWN.match(line)]
    shown = [f"rank {rank} printed: {line}" for line in printed[-_PRINTED_LINES:]]
    return msgspec.structs.replace(outcome, seen="\n".join([outcome.seen, *shown]).strip())
