"""Twelve kinds of hang and death of an unmodified torchrun script, and slow ones that are well.

Each is named on the console and in the account of a copy of the run's folder, in less than 30 seconds, with torch's
own timeouts as they are (30 minutes).
"""

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from syrupy.assertion import SnapshotAssertion

from ranks.launched import Launched, cpu, launched
from torchmuster.finding import Finding, Status
from torchmuster.launch.history import evidence
from torchmuster.launch.history.failure_report import failure_report_of
from torchmuster.runfolder import RunFolder
from torchmuster.units import MiB

pytestmark = pytest.mark.ranks

HOST = os.uname().nodename
SCRIPT = Path(__file__).with_name("kinds_of_hang.py")
SLOW_BUT_HEALTHY = Path(__file__).with_name("slow_but_healthy.py")
# The names of its methods, read without torch.
HEALTHY_KINDS = re.findall(
    r"^    def (?!_|step|epoch)(\w+)\(self\)", SLOW_BUT_HEALTHY.read_text(), re.M
)


@contextlib.contextmanager
def hanging(
    folder: Path, *kinds: str, env: dict[str, str] | None = None, script: Path = SCRIPT
) -> Iterator[Launched]:
    folder.mkdir(exist_ok=True)
    shutil.copy(script, folder / "train.py")
    words = (*cpu("train.py", "--set", "launch.grace=1s"), *kinds)
    with launched(folder, *words, env={"COLUMNS": "400", **(env or {})}) as command:
        yield command


def began(command: Launched, kind: str) -> float:
    """Return when the script came to a kind; of two ranks, one may have been ended before it did."""
    logs = "".join(command.run.rank_log(rank).read_text() for rank in (0, 1))
    found = re.findall(rf"^now {kind} at ([\d.]+)$", logs, re.MULTILINE)
    assert found, logs
    return min(map(float, found))


def copied(command: Launched) -> RunFolder:
    """Return a copy of the run's folder, at another place and without the original."""
    run = command.run
    copy = run.path.parent.parent / "elsewhere" / run.id
    shutil.copytree(run.path, copy)
    run.path.rename(run.path.with_name("gone"))
    return RunFolder(copy)


def cause(run: RunFolder) -> Finding:
    """Return the worst of what the account of a run says, which is what is shown first."""
    findings = failure_report_of(run).findings
    order = [Status.FAILURE, Status.WARNING, Status.NOTE, Status.OK]
    return min(findings, key=lambda one: order.index(one.status))


def test_ranks_that_are_asleep_or_stopped_are_named_and_so_is_that_they_go_on(
    own_machine: Path,
) -> None:
    kinds = {
        "loader": r"in time.sleep for \d+ s at train.py:\d+ in hold \(loading data, step \d+\)",
        "forward": r"in time.sleep for \d+ s at train.py:\d+ in hold \(forward, step \d+\)",
        "user_code": r"in time.sleep for \d+ s at train.py:\d+ in hold(?: \(step \d+\))?",
    }
    with hanging(own_machine / "asleep", *kinds, "stopped") as command:
        for place, (kind, words) in enumerate(kinds.items()):
            command.wait_for(f"now {kind} at")
            command.wait_for_more("keeps the others waiting")
            told = command.lines[-1]
            waiting = "; rank 0 waits in all_reduce"
            assert re.fullmatch(
                rf"warning  rank 1 on {HOST} keeps the others waiting: {words}{waiting}", told
            ), told
            command.wait_for_more("stacks and collectives of the ranks are in")
            hang = evidence.read_hangs(command.run)[place]
            assert hang.folder is not None
            assert "in hold" in (hang.folder / "rank-1.stacks.txt").read_text()
            assert (hang.folder / "rank-0.flight.json").exists()
            (command.folder / f"{kind}.over").touch()
            command.wait_for_more("the ranks continue after")
        command.wait_for_more("rank 1 on", "has been stopped for")
        command.wait_for_more("fix  on ")
        found = re.search(r"kill -CONT (\d+)", command.lines[-1])
        assert found, command
        command.wait_for_more("stacks and collectives of the ranks are in")
        assert cause(command.run).name == "rank-stopped"
        psutil.Process(int(found[1])).send_signal(signal.SIGCONT)
        assert command.end().code == 0
        account = failure_report_of(copied(command))
    assert [one.name for one in account.findings] == ["run-finished"]
    told_of = [what for _, what in account.record.timeline()]
    assert sum("keeps the others waiting" in what for what in told_of) == 3


HANGS = {
    "only_rank_0": "rank 0 is in all_reduce of Float [3] at train.py:",
    "order": "rank 1 is in broadcast of Float [5] at train.py:",
    "uneven": "rank 1 is in barrier at train.py:",
}


@pytest.mark.nightly
def test_ranks_that_called_different_collectives_are_named_with_both_places(
    own_machine: Path, snapshot: SnapshotAssertion
) -> None:
    for kind, place in HANGS.items():  # one by one: after a minute such a hang is ended by itself
        with hanging(own_machine / kind, kind) as command:
            command.wait_for("stacks and collectives of the ranks are in")
            (told,) = [line for line in command.lines if line.startswith("warning  ")]
            assert place in told
            told = told.removeprefix("warning  ").partition(": ")[0]
            assert told == snapshot(name="told")
            (hang,) = evidence.read_hangs(command.run)
            assert [one.name for one in hang.analyse()] == ["collectives-differ"]
            command.send(signal.SIGINT)
            assert command.end().code == 130
            finding = cause(copied(command))
            assert finding.what.partition(": ")[0] == told
            assert place in finding.what
            (seen,) = re.findall(
                r"^collective number \d+ differs between ranks", finding.evidence, re.MULTILINE
            )
            assert re.sub(r"\d+", "N", seen) == snapshot(name="evidence")
            assert finding.fix == snapshot(name="fix")


DEATHS = {
    "shapes": (None, "SIGABRT|RuntimeError", "make all ranks call the same"),
    "unused": (None, "Expected to have finished reduction", "find_unused_parameters=True"),
    "segfault": (1, r"segmentation fault \(SIGSEGV\)", "reinstall"),
    "raises": (1, "ValueError: sample 7 cannot be read", ""),
    "memory": (1, "killed by the kernel: out of memory|killed \\(SIGKILL\\)", ""),
}


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    folder = Path("/sys/fs/cgroup/memory") / f"torchmuster-hangs-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs root and a writable memory cgroup (docker run --privileged): {error}")
    for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
        if (folder / name).exists():
            (folder / name).write_text(str(64 * MiB))
    yield folder
    folder.rmdir()


@pytest.mark.nightly
def test_deaths_are_explained_from_a_copy_of_the_folder(
    own_machine: Path, small_cgroup: Path
) -> None:
    with contextlib.ExitStack() as stack:
        env = {"SMALL_CGROUP": str(small_cgroup / "cgroup.procs")}
        commands = {
            kind: stack.enter_context(hanging(own_machine / kind, kind, env=env)) for kind in DEATHS
        }
        for kind, command in commands.items():
            rank, what, fix = DEATHS[kind]
            result = command.end()
            assert result.code == 1, command
            (told,) = [line for line in result.err.splitlines() if line.startswith("failure  ")]
            assert len(evidence.read_failures(command.run)) == 1
            finding = cause(copied(command))
            assert f"failure  {finding.what.splitlines()[0]}" == told
            assert re.search(what, finding.what), finding
            assert rank is None or finding.what.startswith(f"rank {rank} on {HOST} failed: ")
            assert fix in finding.fix
            assert "/logs/rank-" in finding.evidence
        segfault = evidence.read_failures(
            RunFolder(next((own_machine / "segfault/elsewhere").iterdir()))
        )
        assert re.search(r" \S+/train.py:\d+ in segfault", segfault[0].finding.why)


@pytest.mark.nightly
@pytest.mark.alone  # one sleeps for seconds; a few more, for want of a processor, would be a hang
@pytest.mark.parametrize(
    "kinds", [HEALTHY_KINDS[n : n + 5] for n in range(0, len(HEALTHY_KINDS), 5)], ids=" ".join
)
def test_slow_ranks_that_are_well_raise_no_alarm(own_machine: Path, kinds: list[str]) -> None:
    with hanging(own_machine / "healthy", *kinds, script=SLOW_BUT_HEALTHY) as command:
        result = command.end()
        assert result.code == 0, command
        assert not re.search("^(?:warning|failure|note) ", result.err, re.MULTILINE), command
        assert evidence.read_hangs(command.run) == []
        assert cause(command.run).what.startswith("finished in ")
