"""Ranks that are forked from a process with torch are like new ones: what they see, how they fail, and how they end."""

import asyncio
import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent_attempt import Attempt
from patience import GIVE_UP_S
from torchmuster.launch import protocol
from torchmuster.launch.node import process_cleanup
from torchmuster.launch.node.attempt import RunningAttempt
from torchmuster.launch.node.engines import agent_environment, job_environment
from torchmuster.launch.node.warm_agent import WarmAgent, WarmEngine

pytestmark = pytest.mark.ranks

#: Writes down what a script can see of its process.
SEEN = """\
import atexit, json, os, signal, sys, threading, multiprocessing
atexit.register(lambda: open(f"left-{os.environ['RANK']}", "w").close())
import torch
import torch.distributed as dist
def found(name): return open(f"/proc/self/{name}").read().split("\\0")
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
json.dump({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "cwd": os.getcwd(),
    "main": sys.modules["__main__"].__dict__ is globals(),
    "handlers": [str(signal.getsignal(number)) for number in (15, 2, 1, 10)],
    "threads": threading.active_count(), "torch threads": torch.get_num_threads(),
    "seed": torch.initial_seed(), "unbuffered": sys.stdout.write_through,
    "stdin": os.readlink("/proc/self/fd/0"), "session": os.getsid(0) == os.getpid(),
    "method": multiprocessing.get_start_method(allow_none=True), "total": total.item(),
    "variables": sorted(set(os.environ) - {"LINES", "COLUMNS"}),
    "rank seen": f"RANK={os.environ['RANK']}" in found("environ"),
    "script seen": "train.py" in found("cmdline"),
}, open(f"seen-{os.environ['RANK']}.json", "w"))
dist.destroy_process_group()
"""
ONE_DIES = """\
import os, pathlib, signal, time
if os.environ["RANK"] == "0":
    pathlib.Path("ready").touch()
    while True: time.sleep(600)
while not pathlib.Path("ready").exists(): time.sleep(0.01)
{how}
"""


def attempt_in(folder: Path, script: str) -> Attempt:
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return Attempt(folder, script, alone=True, port=port)


async def run_warm(attempt: Attempt) -> protocol.Ended:
    """Run the ranks of an attempt in a process that was started before."""
    share = attempt.share
    token = f"{attempt.token}.0"
    base = {**os.environ, "OMP_NUM_THREADS": "1"}
    early = job_environment(share.prepare, base, {}, 1, token=token)
    log = share.records / "warm.log"
    warm = await WarmAgent.begin(
        share.prepare.command, share.prepare.folder, early, token=token, log=log
    )
    share = replace(share, own_token=token)
    engine = WarmEngine(share, agent_environment(share, base, {}, threads=1), warm)
    running = RunningAttempt(share, engine, attempt.send)
    await running.start()
    return await asyncio.wait_for(running.watch(), GIVE_UP_S)


async def run_cold(attempt: Attempt) -> protocol.Ended:
    """Run the ranks of an attempt as new processes."""
    running = attempt.running(sys.platform, OMP_NUM_THREADS="1")
    await running.start()
    return await asyncio.wait_for(running.watch(), GIVE_UP_S)


def test_a_forked_rank_sees_what_a_new_one_sees(tmp_path: Path) -> None:
    seen = []
    for name, run in (("cold", run_cold), ("warm", run_warm)):
        attempt = attempt_in(tmp_path / name, SEEN)
        assert asyncio.run(run(attempt)).good, attempt.said
        for rank in range(2):
            assert (tmp_path / name / f"left-{rank}").exists()  # exit handlers have run
            found = json.loads((tmp_path / name / f"seen-{rank}.json").read_text())
            text = json.dumps(found).replace(str(tmp_path / name), "TMP")
            seen.append(json.loads(text))
        assert process_cleanup.processes_of(attempt.token) == []
    assert len({one.pop("seed") for one in seen}) == 4  # each process has its own
    assert seen[2:] == seen[:2]
    assert seen[2]["rank seen"]
    assert seen[2]["script seen"]


@pytest.mark.parametrize(
    ("how", "code", "error"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("raise ValueError('row 7')", 1, "ValueError: row 7"),
        ("os._exit(3)", 3, ""),
    ],
)
def test_how_a_forked_rank_failed_is_known(how: str, code: int, error: str, tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path / "warm", ONE_DIES.format(how=how))
    ended = asyncio.run(run_warm(attempt))
    first = max(ended.failures, key=lambda one: one.ago_s)
    assert (first.rank, first.exit_code, first.error) == (1, code, error)
    assert process_cleanup.processes_of(attempt.token) == []


def test_a_process_that_is_not_needed_ends(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path / "warm", SEEN)

    async def story() -> None:
        prepare = attempt.share.prepare
        env = job_environment(prepare, os.environ, {}, 1, token=attempt.token)
        warm = await WarmAgent.begin(
            prepare.command, prepare.folder, env, token=attempt.token, log=tmp_path / "log"
        )
        assert process_cleanup.processes_of(attempt.token)
        await warm.close()

    asyncio.run(story())
    assert process_cleanup.processes_of(attempt.token) == []
