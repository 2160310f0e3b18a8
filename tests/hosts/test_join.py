"""``muster run --join`` and ``muster join`` between hosts that know nothing of each other: no ssh, no names."""

import subprocess
from pathlib import Path

import msgspec
import pytest

from hosts.conftest import MakeLab
from hosts.host import Host
from hosts.lab import Lab
from hosts.launching import (
    SMOKE,
    SMOKE_WHEN_TOLD,
    Transcript,
    code_of,
    leftovers,
    rank_lines,
    strays,
)
from hosts.namespaces import await_true
from muster_command import muster_argv
from patience import GIVE_UP_S
from torchmuster.launch.transports.join.code import decode_code, encode_code


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
    flags = ["--join", "--nodes", str(nodes), "--device", "cpu", "--ranks", "1", *words]
    return start(host, ["run", *flags, *SMOKE], cwd)


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
    joining = start(second, ["join", code_of(hosting)], tmp_path)
    assert hosting.end() == 0
    assert joining.end() == 0
    assert smoke_lines(2) <= set(rank_lines(hosting))
    assert "2 ranks started" in hosting.text("err")
    assert f"will run in {tmp_path}: {SMOKE[0]}" in joining.text("err")
    assert "the run finished" in joining.text("err")
    await_true("nothing is left", lambda: (leftovers(lab), strays(lab)) == ({}, {}))
    # What lets a machine in is shown, and written down nowhere.
    code = code_of(hosting)
    assert not [path for path in tmp_path.rglob("*.*") if code in path.read_text(errors="replace")]


def test_codes_that_are_wrong_or_used_open_nothing(lab: Lab, tmp_path: Path) -> None:
    first, second = lab.hosts
    (tmp_path / "train.py").write_text(SMOKE_WHEN_TOLD)
    words = ["run", "--join", "--device", "cpu", "--ranks", "1", "train.py"]
    hosting = start(first, words, tmp_path)
    code = code_of(hosting)
    decoded = decode_code(code)
    wrong = encode_code(msgspec.structs.replace(decoded, secret=bytes(16)))
    refused = start(second, ["join", wrong], tmp_path)
    assert refused.end() == 2
    assert "does not know this join code" in refused.text("err")
    joining = start(second, ["join", code], tmp_path)
    joining.wait_for("joined")
    again = start(second, ["join", code], tmp_path)
    assert again.end() == 2
    assert "all machines of this run have joined" in again.text("err")
    (tmp_path / "go").touch()  # not before: whoever hosts has to be there to say so
    assert hosting.end() == 0
    assert joining.end() == 0
    assert smoke_lines(2) <= set(rank_lines(hosting))


def test_a_guest_ends_what_it_runs_when_the_host_is_killed(lab: Lab, tmp_path: Path) -> None:
    first, second = lab.hosts
    (tmp_path / "train.py").write_text(
        "print('running', flush=True)\nimport time\ntime.sleep(600)\n"
    )
    words = ["run", "--join", "--device", "cpu", "--ranks", "1", "train.py"]
    hosting = start(first, words, tmp_path)
    joining = start(second, ["join", code_of(hosting)], tmp_path)
    hosting.wait_for("running")
    hosting.process.kill()
    hosting.process.wait(GIVE_UP_S)
    assert joining.end() == 1
    assert "the launcher is gone" in joining.text("err")
    await_true("nothing left on the host either", lambda: leftovers(lab) == {})
