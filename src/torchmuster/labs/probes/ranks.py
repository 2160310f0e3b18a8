"""Ranks forked from a process that has imported torch, so that an exercise costs no start-up.

Each rank writes its result to a file and then waits to be killed: a rank that exits early would
break the connections of the others. They rendezvous at a store on loopback, like ranks of torchrun.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from torchmuster.labs.probes.bench import Bench, Recognized
from torchmuster.runfolder import write_atomically

_PR_SET_PDEATHSIG = 1
# For the others after the first rank has finished: this share of the deadline, as checks take about
# equally
# long on each rank; if the first rank reports a mistake, only long enough to get the same report.
_AFTER_THE_FIRST = 0.3
_AFTER_A_MISTAKE_S = 1.0
# From most informative to consequential; named mistakes of a lab come before all of these.
_TELLING = ("not-done", "missing", "ended", "raised", "died", "hangs", "wrong-value", "waits")
_LOOK_EVERY_S = 0.01
_PRINTED_LINES = 6
_MESSAGE_LINES = 6  # of an error, after its first line
_TORCHS_OWN = re.compile(r"frame #|\[[A-Z]\d{3}|\[rank\d|\[/\S*\.cc:|Exception raised from|\s*$")


class LearnerOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a rank: the name of a mistake (none if correct), and the evidence."""

    mistake: str = ""
    seen: str = ""


Program = Callable[[Bench], None]


def run_learner_ranks(
    program: Program, *, file: Path, ranks: int, joined: bool, folder: Path, deadline_s: float
) -> list[LearnerOutcome]:
    """Run a program on forked ranks; ranks beyond the deadline are killed and count as hanging."""
    fork = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        port = meeting.getsockname()[1]
        processes = [
            fork.Process(target=_be_rank, args=(program, file, rank, ranks, joined, folder, port))
            for rank in range(ranks)
        ]
        (folder / "scratch").mkdir()
        for rank, process in enumerate(processes):
            for name in ("printed", "stack"):  # a rank may be killed before it has opened them
                (folder / f"{name}-{rank}.txt").touch()
            process.start()
        # After the fork: no rank may inherit the store's thread.
        store = _store(meeting) if ranks > 1 else None
        try:
            return _outcomes(processes, folder, file, deadline_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            del store


def worst(outcomes: list[LearnerOutcome]) -> LearnerOutcome:
    """Return the most informative outcome: a named mistake before its consequences."""
    return min(
        outcomes,
        key=lambda outcome: (
            not outcome.mistake,
            _TELLING.index(outcome.mistake) if outcome.mistake in _TELLING else -1,
        ),
    )


def _store(meeting: socket.socket) -> Store:
    return TCPStore(
        "127.0.0.1",
        meeting.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=meeting.detach(),
    )


def _outcomes(
    processes: Sequence[BaseProcess], folder: Path, file: Path, deadline_s: float
) -> list[LearnerOutcome]:
    give_up = time.monotonic() + deadline_s
    outcomes: dict[int, LearnerOutcome] = {}
    while len(outcomes) < len(processes) and time.monotonic() < give_up:
        for rank, process in enumerate(processes):
            if rank in outcomes:
                continue
            alive = process.is_alive()  # before reading: it may write its file and die in between
            if (left := _left(folder, rank)) is not None:
                outcomes[rank] = left
            elif not alive:
                outcomes[rank] = LearnerOutcome(
                    mistake="died", seen=f"rank {rank}: {_end(process)}"
                )
            else:
                continue
            told = outcomes[rank].mistake not in ("", "wrong-value")
            patience_s = _AFTER_A_MISTAKE_S if told else deadline_s * _AFTER_THE_FIRST
            give_up = min(give_up, time.monotonic() + patience_s)
        time.sleep(_LOOK_EVERY_S)
    waiting = [rank for rank in range(len(processes)) if rank not in outcomes]
    for rank in waiting:
        os.kill(processes[rank].pid or 0, signal.SIGUSR1)
    if waiting:
        time.sleep(0.3)  # for the stacks to be written
    made = any(outcome.mistake for outcome in outcomes.values())
    finished = "".join(
        f"; rank {rank} has finished {outcome.seen}" for rank, outcome in sorted(outcomes.items())
    )
    for rank in waiting:
        place = _where(folder / f"stack-{rank}.txt", file)
        seen = f"rank {rank} is still {place or 'running'}{finished}".strip()
        # Inside a check it only waits for a rank with a mistake.
        outcomes[rank] = LearnerOutcome(
            mistake="hangs" if place or not made else "waits", seen=seen
        )
    return [_with_printed(outcomes[rank], folder, rank) for rank in range(len(processes))]


def _left(folder: Path, rank: int) -> LearnerOutcome | None:
    try:
        return msgspec.json.decode(
            (folder / f"outcome-{rank}.json").read_bytes(), type=LearnerOutcome
        )
    except FileNotFoundError:
        return None


def _end(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _where(stack: Path, file: Path) -> str:
    """Return where a rank hangs: the innermost line of the learner's file."""
    pattern = re.compile(rf'File "{re.escape(str(file))}", line (\d+) in (\S+)')
    match = pattern.search(stack.read_text(encoding="utf-8", errors="replace"))
    return f"at {file.name}:{match[1]}, in {match[2]}" if match else ""


def _with_printed(outcome: LearnerOutcome, folder: Path, rank: int) -> LearnerOutcome:
    """Append what a rank printed, if there is a mistake: learners debug by printing."""
    if not outcome.mistake:
        return outcome
    text = (folder / f"printed-{rank}.txt").read_text(encoding="utf-8", errors="replace")
    own = [line for line in text.splitlines() if not _TORCHS_OWN.match(line)]
    lines = [f"rank {rank} printed: {line}" for line in own[-_PRINTED_LINES:]]
    return msgspec.structs.replace(outcome, seen="\n".join([outcome.seen, *lines]).strip())


def _be_rank(
    program: Program, file: Path, rank: int, ranks: int, joined: bool, folder: Path, port: int
) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # What the learner sees is of the learner's file, not of the check.
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", module=re.escape(file.stem))
    printed = os.open(folder / f"printed-{rank}.txt", os.O_WRONLY | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    stack = (folder / f"stack-{rank}.txt").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack)
    os.chdir(folder / "scratch")
    # As set by torchrun, including its store.
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    bench = Bench(file=file, rank=rank, world_size=ranks, folder=folder / "scratch")
    outcome = _outcome(program, bench, file, joined)
    left = msgspec.json.encode(outcome).decode()
    write_atomically(folder / f"outcome-{rank}.json", left, durable=False)
    while True:
        signal.pause()


def _outcome(program: Program, bench: Bench, file: Path, joined: bool) -> LearnerOutcome:
    try:
        if joined and bench.world_size > 1:
            dist.init_process_group("gloo")
        program(bench)
        return LearnerOutcome()
    except Recognized as error:
        return LearnerOutcome(mistake=error.name, seen=error.seen)
    except NotImplementedError as error:
        return LearnerOutcome(mistake="not-done", seen=_line(error, file).lstrip())
    except (SystemExit, KeyboardInterrupt) as error:
        return LearnerOutcome(mistake="ended", seen=f"{type(error).__name__}{_line(error, file)}")
    except BaseException as error:
        return LearnerOutcome(mistake="raised", seen=_raised(error, file))


def _raised(error: BaseException, file: Path) -> str:
    """Return an error with its place, the learner's lines of the traceback, and its message."""
    message, *more = [line for line in str(error).splitlines() if line.strip()] or [""]
    lines = [f"{type(error).__name__}: {message}{_line(error, file)}"]
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(file) and frame.line:
            lines.append(f"  line {frame.lineno}: {frame.line}")
    return "\n".join([*lines, *more[:_MESSAGE_LINES]])


def _line(error: BaseException, file: Path) -> str:
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)
    ]
    if isinstance(error, SyntaxError):
        return f" at {file.name}:{error.lineno}"
    return f" at {file.name}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""
