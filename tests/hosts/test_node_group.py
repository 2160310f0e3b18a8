"""The same command on every host, as a scheduler starts it: host 1 launches, the others connect, and any may be replaced."""

import signal
import subprocess
from pathlib import Path

import pytest

from hosts.conftest import MakeLab
from hosts.host import Host
from hosts.lab import Lab
from hosts.launching import SMOKE_WHEN_TOLD, Transcript, leftovers, rank_lines, strays
from hosts.namespaces import await_true
from muster_command import muster_argv

SECRET = "correct horse battery staple"
LOSES_NOBODY = "--set=launch.lost_after=100s"


@pytest.fixture
def lab(make_lab: MakeLab) -> Lab:
    return make_lab(2, ssh=False)


def start(lab: Lab, host: Host, cwd: Path, *script: str, **variables: str) -> Transcript:
    group = {
        "TORCHMUSTER_NNODES": str(len(lab.hosts)),
        "TORCHMUSTER_NODE_RANK": str(host.number - 1),
        "TORCHMUSTER_LAUNCHER": lab.hosts[0].address,
        "TORCHMUSTER_JOIN_SECRET": SECRET,
        "TORCHMUSTER_RUN_ID": "group",
        "TORCHMUSTER_JOB_UID": "first",
        **variables,
    }
    flags = ["--device=cpu", "--ranks=1", "--max-restarts=3", LOSES_NOBODY]
    process = host.popen(
        muster_argv(["run", *flags, "--", *script]),
        cwd=cwd,
        env={"NO_COLOR": "1", **group},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    return Transcript(process)


@pytest.fixture
def told(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SMOKE_WHEN_TOLD)
    return tmp_path


def finish(lab: Lab, folder: Path, *nodes: Transcript) -> None:
    (folder / "go").touch()
    assert [node.end() for node in nodes] == [0, 0]
    assert "[rank 1] gathered=[0, 1]" in rank_lines(nodes[0])
    await_true("nothing is left", lambda: (leftovers(lab), strays(lab)) == ({}, {}))


def test_the_secret_reaches_no_rank_and_an_ended_run_is_not_repeated(
    lab: Lab, tmp_path: Path
) -> None:
    first, second = lab.hosts
    (tmp_path / "show.py").write_text(
        "import os\nprint([n for n in os.environ if n.startswith('TORCHMUSTER_')], flush=True)\n"
    )
    waiting = start(lab, second, tmp_path, "show.py")
    waiting.wait_for("waiting for the launcher")
    launcher = start(lab, first, tmp_path, "show.py")
    assert [launcher.end(), waiting.end()] == [0, 0]
    for line in rank_lines(launcher):
        assert "JOIN_SECRET" not in line
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET in path.read_text(errors="replace")]
    # A scheduler that starts a node again because it was late; the launcher's host is gone.
    late = start(lab, second, tmp_path, "show.py")
    assert late.end() == 0
    assert "has ended already, with exit code 0" in late.text("err")
    # Another job of the same name runs.
    again = [
        start(lab, host, tmp_path, "show.py", TORCHMUSTER_JOB_UID="second") for host in lab.hosts
    ]
    assert [node.end() for node in again] == [0, 0]


def test_a_host_that_was_killed_is_replaced(lab: Lab, told: Path) -> None:
    first, second = lab.hosts
    launcher, node = (start(lab, host, told, "train.py") for host in (first, second))
    launcher.wait_for("2 ranks started")
    node.process.kill()
    launcher.wait_for("restart 1 of 3")
    node = start(lab, second, told, "train.py")
    finish(lab, told, launcher, node)


def test_a_host_that_is_asked_to_stop_is_replaced(lab: Lab, told: Path) -> None:
    first, second = lab.hosts
    launcher, node = (start(lab, host, told, "train.py") for host in (first, second))
    launcher.wait_for("2 ranks started")
    node.process.send_signal(signal.SIGTERM)
    assert node.end() == 143
    node = start(lab, second, told, "train.py")
    finish(lab, told, launcher, node)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_launcher_that_comes_back_finds_the_others_waiting(
    lab: Lab, told: Path, number: signal.Signals
) -> None:
    first, second = lab.hosts
    launcher, node = (start(lab, host, told, "train.py") for host in (first, second))
    launcher.wait_for("2 ranks started")
    launcher.process.send_signal(number)
    launcher.end()
    node.wait_for("waiting for the launcher to come back")
    launcher = start(lab, first, told, "train.py")
    launcher.wait_for("resuming in")
    finish(lab, told, launcher, node)


def test_a_script_that_fails_for_good_ends_every_host(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    nodes = [start(lab, host, tmp_path, "broken.py") for host in lab.hosts]
    assert [node.end() for node in nodes] == [1, 1]
    late = start(lab, lab.hosts[0], tmp_path, "broken.py")
    assert late.end() == 1
    assert "has ended already, with exit code 1" in late.text("err")


def test_a_host_with_another_secret_does_not_get_in(lab: Lab, told: Path) -> None:
    first, second = lab.hosts
    launcher = start(lab, first, told, "train.py")
    other = start(lab, second, told, "train.py", TORCHMUSTER_JOIN_SECRET="another secret, as long")
    other.wait_for("the certificate does not match the code")
    other.process.send_signal(signal.SIGTERM)
    assert other.end() == 143
    node = start(lab, second, told, "train.py")
    finish(lab, told, launcher, node)
