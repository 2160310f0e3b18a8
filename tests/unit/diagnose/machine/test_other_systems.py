"""Windows and macOS, by what their programs print (``recorded/``)."""

import json
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_machine import found, made_up_machine
from torchmuster.diagnose.check import Cost, Surroundings
from torchmuster.diagnose.host_checks import run_checks
from torchmuster.diagnose.machine.other_systems import CHECKS
from torchmuster.finding import Status

WINDOWS, MACOS = CHECKS
RECORDED = Path(__file__).with_name("recorded")


def recorded(root: Path, name: str, **changes: Any) -> Surroundings:
    facts = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return made_up_machine(root, **(facts | changes))


def test_windows(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    findings = found(WINDOWS, recorded(tmp_path, "windows_11"))
    assert set(findings) == {"windows-gloo-only", "windows-long-paths", "machine-sleeps"}
    assert "wsl --install" in findings["windows-gloo-only"].fix
    assert "LongPathsEnabled /t REG_DWORD /d 1" in findings["windows-long-paths"].fix
    assert findings["machine-sleeps"].fix == "powercfg /change standby-timeout-ac 0"
    assert list(findings.values()) == snapshot


def test_windows_that_is_set_well(tmp_path: Path) -> None:
    machine = recorded(tmp_path, "windows_11", outputs={})
    assert set(found(WINDOWS, machine)) == {"windows-gloo-only"}


def test_macos(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    findings = found(MACOS, recorded(tmp_path, "macos_15"))
    assert set(findings) == {"macos-gloo-only", "macos-spawn", "machine-sleeps", "macos-open-files"}
    assert findings["machine-sleeps"].fix == "caffeinate -i muster run …"
    assert "256" in findings["macos-open-files"].what
    assert list(findings.values()) == snapshot


def test_a_mac_that_does_not_sleep(tmp_path: Path) -> None:
    outputs = {
        "pmset -g": " displaysleep 10\n sleep                0\n",
        "launchctl limit maxfiles": "\tmaxfiles    65536          unlimited\n",
    }
    findings = found(MACOS, recorded(tmp_path, "macos_15", outputs=outputs))
    assert set(findings) == {"macos-gloo-only", "macos-spawn"}


@pytest.mark.parametrize(("name", "check"), [("windows_11", WINDOWS), ("macos_15", MACOS)])
def test_advice_is_no_alarm_and_only_for_its_own_system(
    tmp_path: Path, name: str, check: object
) -> None:
    examined = run_checks(recorded(tmp_path, name), CHECKS, at_most=Cost.INSTANT)
    assert [one.check for one in examined] == [check]
    assert all(one.status is Status.NOTE for one in examined[0].findings)
