"""``--spares``: a spare takes the place of a host that dies, and the run continues as if nothing had happened."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

from hosts.killing import Run
from hosts.lab import Lab
from hosts.launching import PATIENT
from torchmuster.launch.history import run_state
from torchmuster.launch.history.run_state import TAKEOVER
from torchmuster.runfolder import RunFolder

#: Each attempt writes its ranks and where they run; it ends once it is told to.
WHERE = """
import os, socket, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, number = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.barrier()
print(f"round {number}: rank {rank} on {socket.gethostname()}", flush=True)
on = torch.ones(1)
while on.item():
    on = torch.tensor([float(not os.path.exists("end"))])
    dist.all_reduce(on, op=dist.ReduceOp.MIN)
    time.sleep(0.02)
dist.destroy_process_group()
"""
TWO_AND_ONE = ["--hosts", "node1,node2,node3", "--spares", "1", *PATIENT]


def events(folder: Path, name: str) -> list[dict[str, object]]:
    """Return the events of this name of the run in a folder."""
    (path,) = (folder / "runs").iterdir()
    events = run_state.read_events(RunFolder(path))
    return [event.facts for event in events if event.name == name]


def log_of(folder: Path, rank: int) -> str:
    """Return the log of a rank of the run in a folder."""
    (log,) = folder.glob(f"runs/*/logs/rank-{rank}.log")
    return log.read_text()


def kill_host(lab: Lab, name: str) -> None:
    """Kill every process of a host except its ssh server."""
    host = lab.host(name)
    for pid in host.pids():
        if pid != host.sshd_pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_spare_takes_the_rank_of_a_host_that_dies(lab3: Lab, tmp_path: Path) -> None:
    run = Run.launch(lab3, tmp_path, WHERE, options=TWO_AND_ONE)
    run.wait_for_ranks("round 0: rank", ranks=2)
    kill_host(lab3, "node2")
    run.wait_for_ranks("round 1: rank", ranks=2)
    assert "round 1: rank 0 on node1" in log_of(tmp_path, 0)
    assert "round 1: rank 1 on node3" in log_of(tmp_path, 1)
    (taken,) = events(tmp_path, TAKEOVER)
    assert (taken["host"], taken["spare"]) == ("node2", "node3")
    (tmp_path / "end").touch()
    assert run.transcript.end() == 0
    run.wait_until_clean()
    said = run.transcript.text("err")
    # Nobody but the lost host was connected or tested again.
    assert len(re.findall("rendezvous at", said)) == 1
    assert not re.search(r"\d of \d joined", said)
