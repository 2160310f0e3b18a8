"""The command with which ssh starts a node agent, and what ssh's own words are turned into."""

import asyncio
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from syrupy.assertion import SnapshotAssertion

from patience import GIVE_UP_S
from torchmuster.errors import Impossible
from torchmuster.launch.job import Host, parse_hosts
from torchmuster.launch.transports import ssh

PYTHON = "/opt/my python/bin/python3"


def test_the_command_asks_nobody_notices_a_cut_link_and_holds_nothing_the_user_gave() -> None:
    command = ssh.node_agent_command("ana@b", PYTHON)
    assert command[0] == "ssh"
    assert command[-3:] == [
        "--",
        "ana@b",
        "exec '/opt/my python/bin/python3' -m torchmuster.launch.node.supervisor",
    ]
    assert "-T" in command
    given = {word for word in command if "=" in word}
    assert {"BatchMode=yes", "ServerAliveInterval=3", "ClearAllForwardings=yes"} <= given


def gives_up_after_s(command: list[str]) -> int:
    """Return how long ssh takes a silent link: it asks so often, and ends when it would once more."""
    options = dict(word.split("=", 1) for word in command if "=" in word)
    return int(options["ServerAliveInterval"]) * (int(options["ServerAliveCountMax"]) + 1)


@pytest.mark.parametrize("lost_after_s", [0.5, 1.0, 10.0, 60.0, 61.5, 3600.0])
def test_ssh_outlasts_the_patience_of_the_launcher_but_not_by_much(lost_after_s: float) -> None:
    command = ssh.node_agent_command("b", PYTHON, lost_after_s=lost_after_s)
    assert lost_after_s < gives_up_after_s(command) <= max(6, lost_after_s + 3)


def test_hosts_are_called_with_the_patience_that_was_asked_for(tmp_path: Path) -> None:
    called = fake_ssh(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        call([Host(name="other")], lost_after_s=60)
    assert "ServerAliveCountMax=20" in called.read_text().split()


def fake_ssh(folder: Path) -> Path:
    """Make an ssh that writes down how it was called, and is refused."""
    words = folder / "words"
    (folder / "ssh").write_text(f'#!/bin/sh\necho "$@" > {words}\necho Permission denied >&2\n')
    (folder / "ssh").chmod(0o755)
    return words


def call(hosts: list[Host], **more: float) -> None:
    """Call the hosts until each of them has been given up."""

    async def scene() -> None:
        transport = ssh.SshTransport(hosts, PYTHON, **more)
        await transport.open(lambda place, channel: None)
        async with asyncio.timeout(GIVE_UP_S):
            while not all(map(transport.gave_up, range(len(hosts)))):
                await asyncio.sleep(0.01)
        await transport.close()

    asyncio.run(scene())


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
    remote = ssh.node_agent_command("b", python)[-1]
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
    assert ssh.node_agent_command(host.name, "python3")[-2] == "ana@fd00::1"


@pytest.mark.parametrize(
    ("words", "name", "fix"),
    [
        ("Host key verification failed.", "ssh-host-key-unknown", "ssh b"),
        (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "ssh-host-key-changed",
            "ssh-keygen",
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
            "network-unreachable",
            "ip route get b",
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
            "ssh-hangs-up",
            "MaxStartups",
        ),
        ("something new", "ssh-failed", "ssh b"),
        ("", "ssh-failed", "ssh b"),
    ],
)
def test_what_ssh_says_is_explained_with_something_to_do(
    words: str, name: str, fix: str, snapshot: SnapshotAssertion
) -> None:
    trouble = ssh.diagnose_ssh("b", "python3", 255, words)
    assert trouble.name == name
    assert (trouble.what, trouble.why) == snapshot
    assert fix in trouble.fix
    # What ssh itself said is shown as well; the explanation may be wrong.
    assert trouble.evidence.splitlines()[-1:] == words.splitlines()[-1:]
    assert "{" not in trouble.why + trouble.fix


def test_a_path_with_spaces_can_be_pasted_from_the_fix() -> None:
    trouble = ssh.diagnose_ssh("b", PYTHON, 1, f"{PYTHON}: No module named torchmuster")
    assert f"ssh b '{PYTHON}' -m pip install torchmuster" in trouble.fix


def test_more_hosts_than_ssh_should_hold_are_sent_to_a_scheduler() -> None:
    hosts = [Host(name=f"n{number}") for number in range(ssh.MOST_HOSTS + 1)]
    with pytest.raises(Impossible) as caught:
        ssh.SshTransport(hosts, sys.executable)
    assert caught.value.what.startswith(f"{ssh.MOST_HOSTS + 1} hosts ")
    assert "--slurm" in caught.value.fix


def test_without_ssh_there_is_another_way(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Impossible) as caught:
        ssh.SshTransport([Host(name="a")], sys.executable)
    assert caught.value.what == snapshot
    assert "muster run --join" in caught.value.fix
