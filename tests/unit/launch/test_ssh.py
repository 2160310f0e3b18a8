"""The command with which ssh starts a node agent, and what ssh's own words are turned into."""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from patience import GIVE_UP_S
from torchmuster.errors import Impossible
from torchmuster.launch.job import Host, parse_hosts
from torchmuster.launch.transports import ssh
from torchmuster.launch.transports.local import NODE_AGENT

PYTHON = "/opt/my python/bin/python3"


def test_the_command_asks_nobody_and_holds_nothing_the_user_gave() -> None:
    command = ssh.ssh_command("ana@b", (PYTHON, *NODE_AGENT))
    assert command[0] == "ssh"
    assert command[-3:] == [
        "--",
        "ana@b",
        "exec '/opt/my python/bin/python3' -m torchmuster.launch.node.supervisor",
    ]
    assert "-T" in command
    given = {word for word in command if "=" in word}
    assert {"BatchMode=yes", "ClearAllForwardings=yes"} <= given


def fake_ssh(folder: Path) -> None:
    """Make an ssh that is refused."""
    (folder / "ssh").write_text("#!/bin/sh\necho Permission denied >&2\n")
    (folder / "ssh").chmod(0o755)


def test_many_hosts_have_room_for_their_connections(tmp_path: Path) -> None:
    program = (
        "import asyncio, resource\n"
        "from torchmuster.launch.job import Host\n"
        "from torchmuster.launch.transports.ssh import SshTransport\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))\n"
        "async def scene():\n"
        "    transport = SshTransport([Host(name=f'n{n}') for n in range(256)], 'python3')\n"
        "    await transport.open(lambda place, channel: None)\n"
        "    await transport.close()\n"
        "asyncio.run(scene())\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    fake_ssh(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=GIVE_UP_S,
    )
    assert int(done.stdout) >= 4 * 256


@pytest.mark.parametrize(
    "python", ["/usr/bin/python3", PYTHON, "/x/$(touch owned)", "/x/';touch owned;'", "~/venv/py"]
)
def test_a_path_is_one_word_to_a_remote_shell(python: str) -> None:
    remote = ssh.ssh_command("b", (python, *NODE_AGENT))[-1]
    assert shlex.split(remote) == ["exec", python, "-m", "torchmuster.launch.node.supervisor"]
    shown = subprocess.run(
        ["sh", "-c", remote.replace("exec", "printf '%s\\n'", 1)], capture_output=True, text=True
    )
    assert shown.stdout.splitlines()[0] == python


@pytest.mark.parametrize("user", ["", f"{psutil.Process().username()}@"])
@pytest.mark.parametrize("name", [socket.gethostname(), "localhost", "127.0.0.1", "::1"])
def test_this_machine_is_known_without_a_name_service(user: str, name: str) -> None:
    assert ssh.is_this_host(f"{user}{name}")


@pytest.mark.parametrize("name", ["other", "somebody-else@localhost", "203.0.113.7"])
def test_other_machines_and_other_users_are_called_over_ssh(name: str) -> None:
    assert not ssh.is_this_host(name)


def test_an_ipv6_address_reaches_ssh_as_ssh_writes_it() -> None:
    (host,) = parse_hosts(["ana@[fd00::1]:2"])
    assert ssh.ssh_command(host.name, ("python3",))[-2] == "ana@fd00::1"


@pytest.mark.parametrize(
    ("words", "name", "fix"),
    [
        ("Host key verification failed.", "ssh-host-key-unknown", "ssh b"),
        (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "ssh-host-key-unknown",
            "ssh b",
        ),
        ("ana@b: Permission denied (publickey).", "ssh-key-refused", "ssh-copy-id b"),
        (
            "ssh: Could not resolve hostname b: Name or service not known",
            "host-name-unknown",
            "HostName",
        ),
        (
            "ssh: connect to host b port 22: Connection refused",
            "ssh-not-served",
            "sudo systemctl enable --now ssh || sudo systemctl enable --now sshd",
        ),
        ("ssh: connect to host b port 22: Connection timed out", "host-unreachable", "ping b"),
        ("ssh: connect to host b port 22: No route to host", "host-unreachable", "ping b"),
        (
            "ssh: connect to host b port 22: Network is unreachable",
            "host-unreachable",
            "ping b",
        ),
        (
            "/usr/bin/python3: No module named torchmuster",
            "torchmuster-missing",
            "ssh b python3 -m pip install torchmuster",
        ),
        ("sh: 1: exec: /nowhere: not found", "python-missing", "launch.remote_python"),
        (
            "bash: line 1: /nowhere: No such file or directory",
            "python-missing",
            "launch.remote_python",
        ),
        (
            "kex_exchange_identification: read: Connection reset by peer",
            "ssh-failed",
            "ssh b",
        ),
        ("something new", "ssh-failed", "ssh b"),
        ("", "ssh-failed", "ssh b"),
    ],
)
def test_what_ssh_says_is_explained_with_something_to_do(words: str, name: str, fix: str) -> None:
    trouble = ssh.diagnose_ssh("b", "python3", 255, words)
    assert trouble.name == name
    assert trouble.what == "cannot connect to host b"
    assert fix in trouble.fix
    # What ssh itself said is shown as well; the explanation may be wrong.
    assert trouble.evidence.splitlines()[-1:] == words.splitlines()[-1:]
    assert "{" not in trouble.why + trouble.fix


def test_a_path_with_spaces_can_be_pasted_from_the_fix() -> None:
    trouble = ssh.diagnose_ssh("b", PYTHON, 1, f"{PYTHON}: No module named torchmuster")
    assert f"ssh b '{PYTHON}' -m pip install torchmuster" in trouble.fix


def test_without_ssh_there_is_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Impossible) as caught:
        ssh.SshTransport([Host(name="a")], sys.executable)
    assert caught.value.what == "ssh is not installed on this host"
    assert "muster run --join" in caught.value.fix
