"""The command with which ssh starts a keeper, and what ssh's own words are turned into."""

import shlex
import socket
import subprocess
import sys

import psutil
import pytest

from torchmuster.errors import Impossible
from torchmuster.launch import ssh
from torchmuster.launch.spec import Host, parse_hosts

PYTHON = "/opt/my python/bin/python3"


def test_the_command_asks_nobody_notices_a_cut_link_and_holds_nothing_the_user_gave() -> None:
    command = ssh.keeper_command("ana@b", PYTHON)
    assert command[0] == "ssh"
    assert command[-3:] == [
        "--",
        "ana@b",
        "exec '/opt/my python/bin/python3' -m torchmuster.launch.keeper",
    ]
    assert "-T" in command
    given = {word for word in command if "=" in word}
    assert {"BatchMode=yes", "ServerAliveInterval=3", "ClearAllForwardings=yes"} <= given
    # The other side's limit for a silent launcher is 10 s; ssh must not be slower than that.
    assert "ServerAliveCountMax=3" in given


@pytest.mark.parametrize(
    "python", ["/usr/bin/python3", PYTHON, "/x/$(touch owned)", "/x/';touch owned;'", "~/venv/py"]
)
def test_a_path_is_one_word_to_a_remote_shell(python: str) -> None:
    remote = ssh.keeper_command("b", python)[-1]
    assert shlex.split(remote) == ["exec", python, "-m", "torchmuster.launch.keeper"]
    shown = subprocess.run(
        ["sh", "-c", remote.replace("exec", "printf '%s\\n'", 1)], capture_output=True, text=True
    )
    assert shown.stdout.splitlines()[0] == python


@pytest.mark.parametrize("user", ["", f"{psutil.Process().username()}@"])
@pytest.mark.parametrize("name", [socket.gethostname(), "localhost", "127.0.0.1", "::1"])
def test_this_machine_is_known_without_a_name_service(user: str, name: str) -> None:
    assert ssh.is_here(f"{user}{name}")


@pytest.mark.parametrize("name", ["other", "somebody-else@localhost", "203.0.113.7"])
def test_other_machines_and_other_users_are_called_over_ssh(name: str) -> None:
    assert not ssh.is_here(name)


def test_an_ipv6_address_reaches_ssh_as_ssh_writes_it() -> None:
    (host,) = parse_hosts(["ana@[fd00::1]:2"])
    assert ssh.keeper_command(host.name, "python3")[-2] == "ana@fd00::1"


@pytest.mark.parametrize(
    ("words", "why", "fix"),
    [
        ("Host key verification failed.", "its host key is not known here", "ssh b"),
        (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "another host key",
            "ssh-keygen",
        ),
        ("ana@b: Permission denied (publickey).", "does not accept your key", "ssh-copy-id b"),
        (
            "ssh: Could not resolve hostname b: Name or service not known",
            "name cannot be resolved",
            "HostName",
        ),
        ("ssh: connect to host b port 22: Connection refused", "no ssh server", "systemctl"),
        ("ssh: connect to host b port 22: Connection timed out", "does not answer", "ping b"),
        ("ssh: connect to host b port 22: No route to host", "does not answer", "ping b"),
        ("ssh: connect to host b port 22: Network is unreachable", "no way", "ip route get b"),
        (
            "/usr/bin/python3: No module named torchmuster",
            "torchmuster is not installed for python3",
            "ssh b python3 -m pip install torchmuster",
        ),
        ("sh: 1: exec: /nowhere: not found", "there is no python3", "--remote-python"),
        (
            "bash: line 1: /nowhere: No such file or directory",
            "there is no python3",
            "--remote-python",
        ),
        (
            "kex_exchange_identification: read: Connection reset by peer",
            "hung up before the login",
            "MaxStartups",
        ),
        ("something new", "ssh ended with code 255", "ssh b"),
        ("", "ssh ended with code 255", "ssh b"),
    ],
)
def test_what_ssh_says_is_explained_with_something_to_do(words: str, why: str, fix: str) -> None:
    trouble = ssh.diagnose("b", "python3", 255, words)
    assert trouble.what == "host b cannot take part"
    assert why in trouble.why
    assert trouble.why
    assert fix in trouble.fix
    # What ssh itself said is shown as well; the explanation may be wrong.
    assert trouble.evidence.splitlines()[-1:] == words.splitlines()[-1:]
    assert "{" not in trouble.why + trouble.fix


def test_a_path_with_spaces_can_be_pasted_from_the_fix() -> None:
    trouble = ssh.diagnose("b", PYTHON, 1, f"{PYTHON}: No module named torchmuster")
    assert f"ssh b '{PYTHON}' -m pip install torchmuster" in trouble.fix


def test_more_hosts_than_ssh_should_hold_are_sent_to_a_scheduler() -> None:
    hosts = [Host(name=f"n{number}") for number in range(ssh.MOST_HOSTS + 1)]
    with pytest.raises(Impossible) as caught:
        ssh.SshTransport(hosts, sys.executable)
    assert caught.value.what == f"{ssh.MOST_HOSTS + 1} hosts are too many for ssh"
    assert "--slurm" in caught.value.fix


def test_without_ssh_there_is_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Impossible) as caught:
        ssh.SshTransport([Host(name="a")], sys.executable)
    assert caught.value.what == "there is no ssh on this machine"
    assert "muster host" in caught.value.fix
