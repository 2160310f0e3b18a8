"""``muster hang`` on jobs that plain torchrun started: plain DDP, Hugging Face Trainer, Lightning."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from muster_command import Muster
from patience import GIVE_UP_S
from ranks.launched import LAUNCHERS

pytestmark = pytest.mark.ranks

PLAIN = Path(__file__).with_name("kinds_of_hang.py")


@contextlib.contextmanager
def under_torchrun(folder: Path, script: Path, *words: str, ranks: int = 2) -> Iterator[int]:
    """Start a script under plain torchrun in a folder; yields the process id of torchrun."""
    shutil.copy(script, folder / "train.py")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    agent = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with (
        (folder / "output.txt").open("w") as output,
        subprocess.Popen(
            [sys.executable, *agent, "train.py", *words],
            cwd=folder,
            env={**inherited, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
        ) as process,
    ):
        try:
            yield process.pid
        finally:
            everybody = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for one in everybody:
                with contextlib.suppress(psutil.Error):
                    one.kill()
            psutil.wait_procs(everybody, timeout=GIVE_UP_S)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while not file.exists():
        assert time.monotonic() < deadline, (file.parent / "output.txt").read_text()
        time.sleep(0.05)


def line_of(folder: Path, text: str) -> int:
    """Return the number of the line of the script with this text."""
    lines = (folder / "train.py").read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if text in line]
    return number


def examined(muster: Muster, pid: int) -> tuple[int, dict[str, Any], dict[int, dict[str, Any]]]:
    """Return the exit code, the finding, and the ranks."""
    done = muster("hang", str(pid), "--json")
    told = json.loads(done.out)
    (finding,) = told["findings"]
    return done.code, finding, {one["rank"]: one for one in told.get("ranks", ())}


def test_a_stopped_rank_is_named(own_machine: Path, muster: Muster) -> None:
    with under_torchrun(own_machine, PLAIN, "stopped") as pid:
        wait_for(own_machine / "stopped.holds")
        done = muster("hang", str(pid))
        (rank,) = [
            one for one in psutil.Process(pid).children() if one.status() == psutil.STATUS_STOPPED
        ]
    assert done.code == 1, done
    assert "failure  rank 1 on" in done.out
    assert f"kill -CONT {rank.pid}" in done.out
    assert "all_reduce at train.py:" in done.out  # DDP's gradients, in which rank 0 waits


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "doing", "where"),
    [
        ("loader", "time.sleep", "time.sleep(0.1)"),
        ("forward", "time.sleep", "time.sleep(0.1)"),
        ("lock", "lock.acquire", "lock.acquire()"),
    ],
)
def test_a_rank_that_waits_for_something_else_is_named(
    own_machine: Path, muster: Muster, kind: str, doing: str, where: str
) -> None:
    with under_torchrun(own_machine, PLAIN, kind) as pid:
        wait_for(own_machine / f"{kind}.holds")
        code, finding, ranks = examined(muster, pid)
    assert (code, finding["name"]) == (1, "rank-elsewhere")
    assert finding["what"].startswith("rank 1 on ")
    assert finding["what"].endswith("rank 0 waits in all_reduce")
    assert "has not called all_reduce" in finding["why"]
    assert ranks[1]["doing"] == doing
    assert ranks[1]["place"].startswith(f"train.py:{line_of(own_machine, where)} in ")
    assert ranks[1]["source"] == where
    assert not ranks[1]["waiting"]
    assert ranks[0]["waiting"]
    assert ranks[0]["source"] == "self.model(samples).sum().backward()"


@pytest.mark.nightly
def test_a_loader_worker_is_named(own_machine: Path, muster: Muster) -> None:
    with under_torchrun(own_machine, PLAIN, "worker") as pid:
        wait_for(own_machine / "loader.holds")
        code, finding, ranks = examined(muster, pid)
    assert (code, finding["name"]) == (1, "rank-elsewhere")
    assert ranks[1]["doing"] == "DataLoader.__next__"
    (worker,) = ranks[1]["workers"]
    place = f"train.py:{line_of(own_machine, 'time.sleep(0.1)')} in hold"
    assert (worker["place"], worker["doing"]) == (place, "time.sleep")
    assert place in finding["what"]


@pytest.mark.nightly
def test_a_rank_that_skips_a_collective_is_named_among_three(
    own_machine: Path, muster: Muster
) -> None:
    with under_torchrun(own_machine, PLAIN, "only_rank_0", ranks=3) as pid:
        wait_for(own_machine / "only_rank_0.holds")
        code, finding, ranks = examined(muster, pid)
    assert (code, finding["name"]) == (1, "collectives-differ")
    assert [ranks[rank]["doing"] for rank in range(3)] == ["all_reduce", "barrier", "barrier"]
    assert "rank 0 is in all_reduce at train.py:" in finding["what"]
    assert "ranks 1-2 are in barrier at train.py:" in finding["what"]


@pytest.mark.nightly
@pytest.mark.alone  # a rank without a processor for seconds does not move
def test_slow_ranks_that_are_well_are_not_accused(own_machine: Path, muster: Muster) -> None:
    with under_torchrun(own_machine, PLAIN, "uneven_steps") as pid:
        wait_for(own_machine / "uneven_steps.holds")
        code, finding, _ = examined(muster, pid)
    assert (code, finding["name"]) == (0, "ranks-move")
