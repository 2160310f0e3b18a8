"""``muster host`` and ``muster join`` between hosts that know nothing of each other: no ssh, no names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hosts.conftest import MakeLab
from hosts.host import Host
from hosts.lab import Lab
from hosts.launching import SMOKE, SMOKE_WHEN_TOLD, Transcript, leftovers, rank_lines, strays
from hosts.namespaces import await_true
from muster_command import muster_argv
from patience import GIVE_UP_S


@pytest.fixture
def lab(make_lab: MakeLab) -> Lab:
    return make_lab(2, ssh=False)


def start(host: Host, words: list[str], cwd: Path) -> Transcript:
    process = host.popen(
        muster_argv(words),
        cwd=cwd,
        env={"NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    return Transcript(process)


def host_smoke(host: Host, cwd: Path, *words: str, nodes: int = 2) -> Transcript:
    flags = ["--nnodes", str(nodes), "--device", "cpu", "--ranks", "1", *words]
    return start(host, ["host", *flags, *SMOKE], cwd)


def code_for(transcript: Transcript, machine: int) -> str:
    def codes() -> list[str]:
        return re.findall(r"muster join (\S+)", transcript.text("out"))

    await_true(f"the code of machine {machine}", lambda: len(codes()) > machine - 2)
    return codes()[machine - 2]


def smoke_lines(size: int) -> set[str]:
    numbers = list(range(size))
    return {
        line
        for rank in numbers
        for line in (
            f"[rank {rank}] world_size={size} device=cpu hostname=node{rank + 1}",
            f"[rank {rank}] gathered={numbers}",
            f"[rank {rank}] barrier OK; shutting down",
        )
    }


def test_the_pasted_line_is_all_that_a_machine_needs(lab: Lab, tmp_path: Path) -> None:
    first, second = lab.hosts
    hosting = host_smoke(first, tmp_path)
    joining = start(second, ["join", code_for(hosting, 2)], tmp_path)
    assert hosting.end() == 0
    assert joining.end() == 0
    assert smoke_lines(2) <= set(rank_lines(hosting))
    assert "2 of 2 joined" in hosting.text("err")
    assert f"will run in {tmp_path}: torchmuster.launch.probes.smoke" in joining.text("err")
    assert "the run finished" in joining.text("err")
    await_true("nothing is left", lambda: (leftovers(lab), strays(lab)) == ({}, {}))
    # What lets a machine in is shown, and written down nowhere.
    code = code_for(hosting, 2)
    assert not [path for path in tmp_path.rglob("*.*") if code in path.read_text(errors="replace")]


@pytest.mark.nightly
def test_places_are_those_of_the_codes_in_whatever_order_machines_join(
    make_lab: MakeLab, tmp_path: Path
) -> None:
    lab = make_lab(3, ssh=False)
    first, second, third = lab.hosts
    hosting = host_smoke(first, tmp_path, nodes=3)
    late = start(third, ["join", code_for(hosting, 3)], tmp_path)
    hosting.wait_for("2 of 3 joined")
    assert "machine 2 missing (" in hosting.text("err")
    early = start(second, ["join", code_for(hosting, 2)], tmp_path)
    assert [hosting.end(), early.end(), late.end()] == [0, 0, 0]
    assert smoke_lines(3) <= set(rank_lines(hosting))


@pytest.mark.nightly
def test_without_any_address_the_host_is_found_on_the_network(lab: Lab, tmp_path: Path) -> None:
    first, second = lab.hosts
    hosting = host_smoke(first, tmp_path, "--short-codes")
    code = code_for(hosting, 2)
    joining = start(second, ["join", *code.split("-")], tmp_path)  # blanks are as good as dashes
    assert hosting.end() == 0
    assert joining.end() == 0
    assert smoke_lines(2) <= set(rank_lines(hosting))


def test_codes_that_are_wrong_or_used_open_nothing(lab: Lab, tmp_path: Path) -> None:
    first, second = lab.hosts
    (tmp_path / "train.py").write_text(SMOKE_WHEN_TOLD)
    words = ["host", "--nnodes", "2", "--device", "cpu", "--ranks", "1", "train.py"]
    hosting = start(first, words, tmp_path)
    code = code_for(hosting, 2)
    letters = code.replace("-", "")
    other = letters[:30] + ("2" if letters[30] != "2" else "3") + letters[31:]
    mistyped = start(second, ["join", other], tmp_path)
    assert mistyped.end() == 2
    assert "typing error" in mistyped.text("err")
    joining = start(second, ["join", code], tmp_path)
    joining.wait_for("joined")
    again = start(second, ["join", code], tmp_path)
    assert again.end() == 2
    assert "was used by node2" in again.text("err")
    (tmp_path / "go").touch()  # not before: whoever hosts has to be there to say so
    assert hosting.end() == 0
    assert joining.end() == 0
    assert smoke_lines(2) <= set(rank_lines(hosting))


CROWD = """
import socket, sys
crowd = []
for _ in range(1000):
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex((sys.argv[1], int(sys.argv[2])))
    crowd.append(one)
for one in crowd[::3]:
    try:
        one.send(b"GET / HTTP/1.1\\r\\nHost: muster\\r\\n\\r\\n")
    except OSError:
        pass
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.nightly
def test_a_crowd_at_the_door_does_not_keep_the_guest_out(lab: Lab, tmp_path: Path) -> None:
    first, second = lab.hosts
    hosting = host_smoke(first, tmp_path, "--join-port", "29399")
    code = code_for(hosting, 2)
    crowd = second.popen(
        [sys.executable, "-c", CROWD, first.address, "29399"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert crowd.stdout is not None
    assert crowd.stdout.readline() == "there\n"
    joining = start(second, ["join", code], tmp_path)
    assert hosting.end() == 0
    assert joining.end() == 0
    assert smoke_lines(2) <= set(rank_lines(hosting))
    crowd.kill()
    crowd.wait(GIVE_UP_S)


def test_a_guest_ends_what_it_runs_when_the_host_is_killed(lab: Lab, tmp_path: Path) -> None:
    first, second = lab.hosts
    (tmp_path / "train.py").write_text(
        "print('running', flush=True)\nimport time\ntime.sleep(600)\n"
    )
    words = ["host", "--nnodes", "2", "--device", "cpu", "--ranks", "1", "train.py"]
    hosting = start(first, words, tmp_path)
    joining = start(second, ["join", code_for(hosting, 2)], tmp_path)
    hosting.wait_for("running")
    hosting.process.kill()
    hosting.process.wait(GIVE_UP_S)
    assert joining.end() == 1
    assert "the launcher is gone" in joining.text("err")
    await_true("nothing left on the host either", lambda: leftovers(lab) == {})


# What a host would like to run on a machine that joined: code of its own, through the standard library.
_OPENS = "open({place!r} + '/ran-' + __import__('os').environ['RANK'], 'w')"


@pytest.mark.nightly
@pytest.mark.parametrize("trusted", [False, True], ids=["untrusted", "trusted"])
def test_machine_runs_a_module_outside_its_folder_only_with_trust_host(
    lab: Lab, tmp_path: Path, trusted: bool
) -> None:
    first, second = lab.hosts
    (tmp_path / "host").mkdir()
    (tmp_path / "guest").mkdir()
    flags = ["--nnodes", "2", "--device", "cpu", "--ranks", "1", "--env", "SOME_NAME=1"]
    timeit = ["-m", "timeit", "-n", "1", "-r", "1", _OPENS.format(place=str(tmp_path))]
    hosting = start(first, ["host", *flags, *timeit], tmp_path / "host")
    words = ["join", *(["--trust-host"] if trusted else []), code_for(hosting, 2)]
    joining = start(second, words, tmp_path / "guest")
    if trusted:
        assert [hosting.end(), joining.end()] == [0, 0]
        assert sorted(path.name for path in tmp_path.glob("ran-*")) == ["ran-0", "ran-1"]
        return
    assert [hosting.end(), joining.end()] == [2, 1]
    assert not list(tmp_path.glob("ran-*"))
    assert hosting.text("out").count("muster join ") == 1  # no new code for a run that is over
    for told in (hosting, joining):
        assert "module 'timeit'" in told.text("err")
        assert "--trust-host" in told.text("err")


@pytest.mark.nightly
def test_machine_refuses_a_variable_that_could_load_code(lab: Lab, tmp_path: Path) -> None:
    first, second = lab.hosts
    (tmp_path / "train.py").write_text("raise AssertionError('must not run')\n")
    flags = ["--nnodes", "2", "--device", "cpu", "--ranks", "1", "--env", f"PYTHONPATH={tmp_path}"]
    hosting = start(first, ["host", *flags, "train.py"], tmp_path)
    joining = start(second, ["join", code_for(hosting, 2)], tmp_path)
    assert [hosting.end(), joining.end()] == [2, 1]
    for told in (hosting, joining):
        assert "PYTHONPATH" in told.text("err")
    assert "must not run" not in hosting.text("out") + hosting.text("err")
