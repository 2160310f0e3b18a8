"""``examples/train_torchrun.py`` under every launcher that it names: S1.1, S1.2 and S1.3 of the specification."""

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster_command import Muster
from patience import GIVE_UP_S

pytestmark = pytest.mark.ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_torchrun.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def expected_lines(world_size: int) -> list[str]:
    lines = []
    for rank in range(world_size):
        lines += [
            f"[rank {rank}] world_size={world_size} device=cpu hostname={socket.gethostname()}",
            f"[rank {rank}] gathered={list(range(world_size))}",
            f"[rank {rank}] barrier OK; shutting down",
        ]
    return sorted(lines)


def run_two_agents(folder: Path, *rendezvous: str) -> list[str]:
    """Run torchrun's agent twice, as on two machines; return the lines that the ranks printed."""
    command = [*TORCHRUN, *rendezvous, str(EXAMPLE)]
    agents = [
        subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    try:
        output = "".join(agent.communicate(timeout=GIVE_UP_S)[0] for agent in agents)
        assert [agent.returncode for agent in agents] == [0, 0], output
    finally:
        for agent in agents:
            agent.kill()
    return sorted(line for line in output.splitlines() if line.startswith("[rank "))


def accepts_connections(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@contextlib.contextmanager
def etcd_server(folder: Path) -> Iterator[int]:
    """Run etcd with its API version 2, which torch uses; yield its port."""
    port = free_port()
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
    server = subprocess.Popen(
        [
            "etcd",
            "--enable-v2",
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    try:
        give_up_s = time.monotonic() + GIVE_UP_S
        while not accepts_connections(port):
            assert time.monotonic() < give_up_s
            time.sleep(0.1)
        yield port
    finally:
        server.kill()
        server.wait(GIVE_UP_S)


def test_under_muster_run(muster: Muster, own_machine: Path) -> None:
    done = muster("run", "--device", "cpu", "--ranks", "2", str(EXAMPLE))
    assert done.code == 0, done
    lines = [line for line in done.out.splitlines() if line.startswith("[rank ")]
    expected = expected_lines(2)
    assert [line for line in expected if not any(line in shown for shown in lines)] == []


def test_two_agents_with_c10d(tmp_path: Path) -> None:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    lines = run_two_agents(tmp_path, "--rdzv-backend=c10d", endpoint, "--rdzv-id=example")
    assert lines == expected_lines(2)


@pytest.mark.skipif(shutil.which("etcd") is None, reason="missing: etcd")
def test_two_agents_with_etcd(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as port:
        endpoint = f"--rdzv-endpoint=127.0.0.1:{port}"
        lines = run_two_agents(tmp_path, "--rdzv-backend=etcd-v2", endpoint, "--rdzv-id=example")
    assert lines == expected_lines(2)
