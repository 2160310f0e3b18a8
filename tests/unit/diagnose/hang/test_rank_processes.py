"""Which processes are ranks, by their environment; real processes."""

from pathlib import Path

from torchmuster.diagnose.hang.rank_processes import RankProcess, ranks_here
from unit.diagnose.hang.plain_ranks import started

WITH_WORKER = """\
import os, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(os.getpid(), worker.pid, flush=True)
time.sleep(600)
"""


def ranks_of(port: int) -> list[RankProcess]:
    return [one for one in ranks_here().ranks if one.job == f"127.0.0.1:{port}"]


def test_a_rank_is_the_topmost_python_process_with_its_number(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WITH_WORKER)
    shell = ("bash", "-c", '"$@"; true', "bash")  # a script around Python, which stays
    with (
        started(script, port=41001, rank=0) as (_, first, _),
        started(script, port=41001, rank=1, before=shell) as (outer, second, worker),
    ):
        ranks = {one.rank: one for one in ranks_of(41001)}
        assert {rank: one.pid for rank, one in ranks.items()} == {0: first, 1: second}
        assert {outer, worker} <= set(ranks[1].related)
        assert outer not in ranks[0].related
        assert ranks[0].command.endswith("train.py")
        assert (ranks[0].world_size, ranks[0].local_world_size) == (2, 2)
        assert not ranks[0].uses_gpu
    assert ranks_of(41001) == []


def test_jobs_are_told_apart(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    with (
        started(script, port=41002, rank=0) as (_, first),
        started(script, port=41003, rank=1) as (_, second),
    ):
        (one,), (other,) = ranks_of(41002), ranks_of(41003)
        assert (one.pid, other.pid) == (first, second)
