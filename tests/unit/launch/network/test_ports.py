"""Who holds a port, asked of the real system."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from torchmuster.launch.network import listening

LISTENS = """
import socket, sys
sock = socket.create_server(("127.0.0.1", 0))
print(sock.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_the_holder_is_told_by_command_pid_and_user() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LISTENS, "--api-key", "hunter2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        holder = listening.holder_of(int(child.stdout.readline()))
        child.communicate("")
    assert holder is not None
    assert holder.startswith(f"{sys.executable} -c ")
    assert holder.endswith(
        f"--api-key [redacted] (pid {child.pid}, user {psutil.Process().username()})"
    )


def test_a_port_that_nobody_holds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        assert f"(pid {os.getpid()}, " in (listening.holder_of(port) or "")
    assert listening.holder_of(port) is None


def hidden(port: int, status: str = psutil.CONN_LISTEN) -> SimpleNamespace:
    return SimpleNamespace(laddr=("0.0.0.0", port), status=status, pid=None)


def test_a_holder_that_may_not_be_looked_at_is_told_by_its_owner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
        "   0: 0100007F:72D8 0200007F:1F90 01 00000000:00000000 00:00000000 00000000  1007  0 1\n"
        "   1: 00000000:72D8 00000000:0000 0A 00000000:00000000 00:00000000 00000000 54321  0 2\n"
    )
    monkeypatch.setattr(psutil, "net_connections", lambda kind: [hidden(29400)])
    assert listening.holder_of(29400, proc_root=tmp_path) == "a program of user 54321"
    assert listening.holder_of(29400, proc_root=tmp_path / "none") == "another user's program"
    assert listening.holder_of(29401, proc_root=tmp_path) is None
