"""``muster gpus`` and ``muster gpus pick`` as their users run them, on machines of every kind."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from muster_command import Muster, muster_argv
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from patience import GIVE_UP_S

pytestmark = pytest.mark.slow

Machine = Callable[[Scenario], Path]


def own_process(scenario: Scenario, gpu: int, memory: int = 2**30) -> Scenario:
    """Let this very test process work on a GPU, so that there is somebody real to be found."""
    process = {"pid": os.getpid(), "memory": memory, "type": "compute", "sm_percent": 0}
    scenario["devices"][gpu]["processes"] = [process]
    scenario["devices"][gpu]["memory"]["used"] = memory + 2**22
    return scenario


def test_the_table_tells_who_uses_what(machine: Machine, muster: Muster) -> None:
    machine(own_process(scenarios.eight_a100_idle(), 3, 40 * 2**30))
    result = muster("gpus", env={"COLUMNS": "120"})
    assert result.code == 0
    headline, _, titles, *rows = result.out.splitlines()
    assert "8 GPUs, 7 free" in headline
    assert "570.86.15" in headline
    assert titles.split() == ["GPU", "name", "memory", "busy", "temp", "power", "used", "by"]
    assert rows[0].split()[:2] == ["0", "A100-SXM4-80GB"]
    assert rows[0].rstrip().endswith("free")
    assert "40.0 / 80 GiB" in rows[3]
    assert psutil.Process().cmdline()[0][:12] in rows[3]
    assert result.out.endswith("muster gpus pick --num-gpus 7 python train.py\n")


def test_a_gpu_that_is_lost_is_a_failure_with_its_fix(machine: Machine, muster: Muster) -> None:
    machine(scenarios.one_failing())
    result = muster("gpus")
    assert result.code == 1
    assert "failure  GPU 2 " in result.out
    assert "fix  sudo dmesg | grep -i xid" in result.out


def test_without_any_driver_the_cpu_is_shown_and_nothing_is_wrong(
    own_machine: Path, muster: Muster
) -> None:
    result = muster("gpus", env={"LD_LIBRARY_PATH": ""})
    assert result.code == 0
    assert "no GPU found" in result.out
    assert result.err == ""


def test_json_has_everything(machine: Machine, muster: Muster) -> None:
    machine(own_process(scenarios.eight_a100_idle(), 1))
    node = json.loads(muster("gpus", "--json", env={"CUDA_VISIBLE_DEVICES": "1,2"}).out)
    first, second = node["accelerators"][:2]
    assert (first["visible"], first["hidden_by"]) == (False, "CUDA_VISIBLE_DEVICES=1,2")
    assert (second["visible"], second["in_use"]) == (True, True)
    (process,) = second["processes"]
    assert process["pid"] == os.getpid()
    assert process["user"]
    assert node["links"][0]["kind"] == "NV12"
    assert node["findings"] == []


def test_a_claim_is_shown_with_its_command(machine: Machine, muster: Muster) -> None:
    machine(scenarios.eight_a100_idle())
    words = ["gpus", "pick", "--num-gpus", "2", "--", *muster_argv(["gpus", "--json"])]
    node = json.loads(muster(*words).out)
    claim = node["accelerators"][0]["claim"]
    assert claim["command"].endswith("torchmuster gpus --json")
    assert [one["claim"] is not None for one in node["accelerators"]] == [True] * 2 + [False] * 6


def test_pick_prints_uuids_for_the_shell_and_the_reason_beside(
    machine: Machine, muster: Muster
) -> None:
    machine(scenarios.eight_a100())
    result = muster("gpus", "pick", "--num-gpus", "2", "--min-free", "30GiB")
    assert result.code == 0
    assert result.out == f"{scenarios.gpu_uuid(6)},{scenarios.gpu_uuid(7)}\n"
    assert "GPUs 6, 7" in result.err
    node = json.loads(muster("gpus", "--json").out)
    assert not any(device["claim"] for device in node["accelerators"])


def test_pick_json(machine: Machine, muster: Muster) -> None:
    machine(scenarios.eight_a100_idle())
    answer = json.loads(muster("gpus", "pick", "--json").out)
    assert [one["number"] for one in answer["devices"]] == ["0"]
    assert answer["environment"] == {"CUDA_VISIBLE_DEVICES": scenarios.gpu_uuid(0)}


def test_pick_becomes_the_command(machine: Machine, muster: Muster) -> None:
    machine(scenarios.eight_a100_idle())
    script = 'echo "$CUDA_VISIBLE_DEVICES"; echo "$@"; exit 7'
    result = muster("gpus", "pick", "--gpu-ids", "2,5", "--", "sh", "-c", script, "x", "--", "-v")
    assert result.code == 7
    uuids, arguments = result.out.splitlines()
    assert uuids == f"{scenarios.gpu_uuid(2)},{scenarios.gpu_uuid(5)}"
    assert arguments == "-- -v"


def test_waiting_says_at_once_what_is_in_the_way(machine: Machine, muster: Muster) -> None:
    machine(own_process(scenarios.eight_a100_idle(), 0))
    words = ["gpus", "pick", "--gpu-ids", "0", "--wait"]
    # Without an end: on a busy machine the first look alone may take longer than one that is waited for.
    with subprocess.Popen(muster_argv(words), stderr=subprocess.PIPE, text=True) as waiter:
        assert waiter.stderr is not None
        first = waiter.stderr.readline()
        waiter.kill()
    assert re.match(r"waiting for GPU 0 \(\d+ s\): ", first)
    assert f"GPU 0: in use by {_user()} (pid {os.getpid()})" in first
    assert muster("gpus", "pick", "--gpu-ids", "0", "--wait=1s").code == 3


def _user() -> str:
    import getpass

    return getpass.getuser()


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("--num-gpus 9", "9 GPUs"),
        ("--num-gpus 0", "--num-gpus: '0'"),
        ("--min-free 30", "--min-free: '30'"),
        ("--min-free lots", "--min-free: 'lots'"),
        ("--min-free 100GiB", "100 GiB"),
        ("--gpu-ids 8", "GPU 8"),
        ("--wait=5x", "--wait: '5x'"),
        ("-- no-such-program-here", "'no-such-program-here'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    machine: Machine, muster: Muster, line: str, value: str
) -> None:
    machine(scenarios.eight_a100_idle())
    result = muster("gpus", "pick", *line.split())
    assert (result.code, result.out) == (2, "")
    complaint = re.sub("(?s)^usage: .*\n(?=muster)", "", result.err)
    assert value in complaint
    assert "Traceback" not in result.err


def test_a_refusal_is_json_where_json_was_asked_for(machine: Machine, muster: Muster) -> None:
    machine(scenarios.eight_a100_idle())
    result = muster("gpus", "pick", "--num-gpus", "9", "--json")
    assert result.code == 2
    (finding,) = json.loads(result.out)["findings"]
    assert finding["name"] == "too-few-devices"
    assert finding["fix"] == "request 8 GPUs: --num-gpus 8"


def test_the_command_gets_its_signals_as_they_should_be(machine: Machine, muster: Muster) -> None:
    machine(scenarios.eight_a100_idle())
    result = muster("gpus", "pick", "--", "bash", "-c", "yes | head -1; echo ${PIPESTATUS[@]}")
    assert result.out == "y\n141 0\n"
    assert "Broken pipe" not in result.err


def test_a_broken_driver_is_named_where_gpus_are_asked_for(
    machine: Machine, muster: Muster
) -> None:
    machine(scenarios.driver_mismatch())
    result = muster("gpus", "pick")
    assert result.code == 2
    assert "fix  sudo reboot\n" in result.err


def test_all_hidden_is_said_and_not_waited_for(machine: Machine, muster: Muster) -> None:
    machine(scenarios.eight_a100_idle())
    result = muster("gpus", env={"CUDA_VISIBLE_DEVICES": ""})
    assert 'hidden by CUDA_VISIBLE_DEVICES=""' in result.out
    assert "--wait" not in result.out


def test_a_reader_that_goes_away_is_no_error(machine: Machine) -> None:
    machine(scenarios.sixty_four())
    command = " ".join(muster_argv(["gpus", "--json"]))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -1"],
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


def test_completion_scripts_know_the_commands(muster: Muster, tmp_path: Path) -> None:
    script = muster("completion", "bash")
    assert script.code == 0
    (tmp_path / "completion.bash").write_text(script.out)
    words = (
        "COMP_WORDS=(muster gpus pick --min-f); COMP_CWORD=3; COMP_LINE='muster gpus pick --min-f'"
    )
    probe = f"source completion.bash; {words}; _shtab_muster muster --min-f pick; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", probe], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "--min-free"
