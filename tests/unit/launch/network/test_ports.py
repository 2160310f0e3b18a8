"""Who holds a port, asked of the real system."""

import os
import socket
import subprocess
import sys
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


def test_a_holder_that_may_not_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = SimpleNamespace(laddr=("0.0.0.0", 29400), status=psutil.CONN_LISTEN, pid=None)
    monkeypatch.setattr(psutil, "net_connections", lambda kind: [hidden])
    assert listening.holder_of(29400) == "another user's program"
    assert listening.holder_of(29401) is None
