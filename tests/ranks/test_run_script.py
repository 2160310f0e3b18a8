"""A script that knows nothing of us, as two ranks: it finds everything where torchrun puts it."""

import json
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from muster_command import Muster
from ranks.launched import cpu, launched, said_by
from torchmuster.launch.node.process_cleanup import TOKEN_VARIABLE

pytestmark = pytest.mark.ranks

UNMODIFIED = """\
import argparse, dataclasses, json, os, pickle, sys, threading, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from beside import Batch

@dataclasses.dataclass
class Step:
    number: int

def load(queue, step):
    queue.put(Step(step.number + 1))

def late():
    time.sleep(0.5)
    print("a thread after the end", flush=True)

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    worker = context.Process(target=load, args=(queue, Step(1)))
    worker.start()
    facts = {
        "sum": total.item(), "size": size, "lr": given.lr, "words": given.words,
        "argv0": sys.argv[0], "file": os.path.basename(__file__), "name": __name__,
        "beside": Batch.__module__, "pickled": pickle.loads(pickle.dumps(Step(3))).number,
        "spawned": queue.get().number, "threads": torch.get_num_threads(),
        "env": {key: os.environ[key] for key in (
            "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "EXTRA",
            "TORCHELASTIC_RESTART_COUNT")},
    }
    worker.join()
    for number in range(200):
        print(f"step {number}")
    print("facts", json.dumps(facts), flush=True)
    sys.stderr.write("to standard error\\n")
    with open(f"out-{rank}", "w") as out:
        out.write("written where the command was given")
    dist.destroy_process_group()
    threading.Thread(target=late).start()

if __name__ == "__main__":
    main()
"""


def test_an_unmodified_script(muster: Muster, own_machine: Path) -> None:
    (own_machine / "code").mkdir()
    (own_machine / "code" / "train.py").write_text(UNMODIFIED)
    (own_machine / "code" / "beside.py").write_text("class Batch: pass\n")
    words = cpu("code/train.py", "--env", "EXTRA=a b")
    result = muster(*words, "--lr", "1e-4", "--", "x y", "$HOME")
    assert result.code == 0, result
    (run,) = (own_machine / "runs").iterdir()
    for rank in (0, 1):
        lines = (run / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert [line for line in lines if line.startswith("step")] == [
            f"step {number}" for number in range(200)
        ]
        (facts,) = [json.loads(line[6:]) for line in lines if line.startswith("facts")]
        threads = facts.pop("threads")
        assert facts == {
            "sum": 3.0,
            "size": 2,
            "lr": 1e-4,
            "words": ["x y", "$HOME"],
            "argv0": "code/train.py",
            "file": "train.py",
            "name": "__main__",
            "beside": "beside",
            "pickled": 3,
            "spawned": 2,
            "env": {
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "OMP_NUM_THREADS": str(threads),
                "EXTRA": "a b",
                "TORCHELASTIC_RESTART_COUNT": "0",
            },
        }
        assert threads == max(1, len(os.sched_getaffinity(0)) // 2)
        assert "to standard error" in lines
        assert lines[-1] == "a thread after the end"
        assert (own_machine / f"out-{rank}").read_text() == "written where the command was given"
    # One console: what both said at the same moment once, the ranks' own lines with their names.
    shown = result.out.splitlines()
    last = sorted(line for line in shown if line.endswith("] step 199"))
    # On a busy machine it may not have been the same moment.
    assert last in (["[all 2 ranks] step 199"], ["[rank 0] step 199", "[rank 1] step 199"])
    assert len([line for line in shown if "facts" in line]) == 2
    assert [line for line in shown if line.startswith("[rank 1] facts ")]
    assert [line for line in shown if line.endswith(" to standard error")]
    own = [line for line in result.err.splitlines() if line.startswith("muster: ")]
    assert own[0] == f"muster: 2 ranks started: CPU; run {run.name}"
    assert own[-1].startswith("muster: finished in ")


def test_while_it_runs_the_store_listens_on_this_machine_only(own_machine: Path) -> None:
    (own_machine / "train.py").write_text(
        "import time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print('together', dist.get_rank(), flush=True)\n"
        "time.sleep(600)\n"
    )
    with launched(own_machine, *cpu("train.py")) as run:
        run.wait_for("together 0", "together 1")
        job = json.loads(run.run.job.read_text())
        listening = {
            (connection.laddr.ip, connection.laddr.port)
            for process in run.alive()
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        tokens = {
            process.environ().get(TOKEN_VARIABLE, "").partition(".")[0] for process in run.alive()
        }
        children = psutil.Process(run.process.pid).children(recursive=True)
        assert {one.pid for one in run.alive()} == {run.process.pid, *(one.pid for one in children)}
        run.send(signal.SIGKILL)
        run.end()
        run.wait_until_nothing_lives()
    assert listening, "the ranks must meet somewhere"
    assert {address for address, _ in listening} == {"127.0.0.1"}, listening
    assert job["token"] in tokens
    # Nothing of it is left, the port included.
    for address, port in listening:
        with socket.socket() as probe:
            assert probe.connect_ex((address, port)) != 0


def test_a_module_and_a_single_rank(muster: Muster, own_machine: Path) -> None:
    (own_machine / "package").mkdir()
    (own_machine / "package" / "beside.py").write_text("VALUE = 7\n")
    (own_machine / "package" / "train.py").write_text(
        "from .beside import VALUE\nimport sys\nprint('module', VALUE, __name__, sys.argv[1:])\n"
    )
    words = ["--device", "cpu", "--name", "My first run!"]
    result = muster("run", *words, "-m", "package.train", "--lr")
    assert result.code == 0, result
    assert result.out == "module 7 __main__ ['--lr']\n"
    (run,) = (own_machine / "runs").iterdir()
    assert "-my-first-run-" in run.name


@pytest.mark.nightly
def test_this_host_may_take_longer_than_the_join_timeout(muster: Muster, own_machine: Path) -> None:
    """On a loaded host its node agent starts late; as a child process it is known to be alive."""
    (own_machine / "train.py").write_text("print('started')\n")
    result = muster("run", "--device", "cpu", "--set", "launch.join_timeout=0.01s", "train.py")
    assert (result.code, result.out) == (0, "started\n"), result


def test_a_run_folder_that_was_deleted_is_named_at_the_end(
    muster: Muster, own_machine: Path
) -> None:
    (own_machine / "train.py").write_text("import shutil\nshutil.rmtree('runs')\n")
    result = muster("run", "--device", "cpu", "train.py")
    assert result.code == 0, result
    assert "was deleted during the run" in result.err
    assert "logs in" not in result.err


def test_what_the_environment_says_of_threads_and_libraries_holds(
    muster: Muster, own_machine: Path
) -> None:
    (own_machine / "train.py").write_text(
        "import os\n"
        "names = ('OMP_NUM_THREADS', 'NCCL_DEBUG', 'PET_NNODES', 'TORCHMUSTER_RUN_TOKEN')\n"
        "print([os.environ.get(name, '-')[:4] for name in names[:3]], len(os.environ[names[3]]))\n"
    )
    env = {"OMP_NUM_THREADS": "3", "NCCL_DEBUG": "WARN", "PET_NNODES": "1"}
    result = muster(*cpu("train.py"), env=env)
    assert result.code == 0, result
    for rank in (0, 1):
        (said,) = said_by(rank, result.out)
        assert said.startswith("['3', 'WARN', '1']")


def test_a_group_that_the_script_leaves_open_is_left_in_the_end(
    muster: Muster, own_machine: Path
) -> None:
    # Else its threads outlive Python, which aborts now and then.
    (own_machine / "train.py").write_text(
        "import atexit, os, threading, time, torch, torch.distributed as dist\n"
        "def late():\n"
        "    time.sleep(0.5)\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "    print('a thread needed it', flush=True)\n"
        "leave = dist.destroy_process_group\n"
        "def destroy():\n"
        "    print('left by', os.environ['RANK'], flush=True)\n"
        "    leave()\n"
        "dist.destroy_process_group = destroy\n"
        "dist.init_process_group('gloo')\n"
        "threading.Thread(target=late).start()\n"
    )
    result = muster(*cpu("train.py"))
    assert result.code == 0, result
    (run,) = (own_machine / "runs").iterdir()
    for rank in (0, 1):
        lines = (run / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert lines[-2:] == ["a thread needed it", f"left by {rank}"]
