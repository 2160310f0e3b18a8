"""What is made of a trial of torch: crashes, hangs, wrong values, slow devices; records as data."""

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from site_packages import SitePackages, surroundings
from torchmuster.devices.model import Node
from torchmuster.diagnose.check import DevicesSilent
from torchmuster.diagnose.machine import torch_at_work
from torchmuster.diagnose.machine.torch_at_work import Trial, judge_trial, try_torch
from torchmuster.diagnose.rank_record import MARK
from torchmuster.finding import Finding, Status

IMPORT = {"stage": "import", "seconds": 2.31, "gpu_build": False, "devices": 0}
GROUP = {"stage": "group", "error": ""}


@pytest.fixture
def site(tmp_path: Path) -> SitePackages:
    site = SitePackages(tmp_path)
    site.torch()
    return site


def begun(stage: str) -> dict[str, Any]:
    return {"stage": stage, "begun": True}


def device(name: str = "cpu", **fields: Any) -> dict[str, Any]:
    return {
        "stage": "device",
        "name": name,
        "compared": 9,
        "wrong": 0,
        "gflops": 100.0,
        "error": "",
        **fields,
    }


def told(*records: Mapping[str, Any], gpus: bool = False, **fields: Any) -> list[Finding]:
    return judge_trial(Trial(records=records, **fields), python="/opt/python", gpus=gpus)


def only(findings: list[Finding]) -> Finding:
    (found,) = findings
    return found


def test_all_is_well(snapshot: SnapshotAssertion) -> None:
    found = only(told(IMPORT, GROUP, device()))
    assert found.status is Status.OK
    assert found == snapshot


def test_an_import_that_fails(snapshot: SnapshotAssertion) -> None:
    complaint = "Traceback\nImportError: torch is tired"
    found = only(told(begun("import"), code=1, complaint=complaint))
    assert (found.name, found.status) == ("torch-import-fails", Status.FAILURE)
    assert "ImportError: torch is tired" in found.what
    assert "pip install --force-reinstall torch" in found.fix
    assert found == snapshot
    assert found.evidence == complaint


def test_an_import_that_fails_in_a_known_way(snapshot: SnapshotAssertion) -> None:
    complaint = (
        "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory"
    )
    found = only(told(begun("import"), code=1, complaint=complaint))
    assert "libcudnn.so.9" in found.why
    assert found.fix.startswith("python -m pip install")
    assert found == snapshot


def test_a_crash_names_its_place(snapshot: SnapshotAssertion) -> None:
    found = only(told(begun("import"), IMPORT, begun("group"), code=-11))
    assert found.name == "torch-crashes"
    assert "signal 11" in found.what
    assert found == snapshot


def test_a_hang_names_its_place(snapshot: SnapshotAssertion) -> None:
    found = only(told(begun("import"), code=None, seconds=60.0))
    assert (found.name, found.status) == ("torch-hangs", Status.FAILURE)
    assert "60 s" in found.what
    assert found == snapshot


def test_gloo_that_fails() -> None:
    found = only(told(IMPORT, {"stage": "group", "error": "no address"}, device()))
    assert (found.name, found.why) == ("gloo-fails", "no address")


def test_a_device_that_computes_wrongly(snapshot: SnapshotAssertion) -> None:
    found = only(told(IMPORT, GROUP, device(), device("cuda:2", wrong=3), gpus=True))
    assert (found.name, found.status) == ("device-computes-wrongly", Status.FAILURE)
    assert found.what.startswith("cuda:2 ")
    assert found == snapshot


def test_a_device_that_the_build_has_no_code_for(snapshot: SnapshotAssertion) -> None:
    error = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    bad = device("cuda:0", error=error, built_for=["sm_80", "sm_90"])
    found = only(told(IMPORT, GROUP, bad, gpus=True))
    assert found.name == "gpu-not-in-build"
    assert "sm_80, sm_90" in found.evidence
    assert found == snapshot


def test_gpus_that_torch_does_not_see(snapshot: SnapshotAssertion) -> None:
    blind = {**IMPORT, "gpu_build": True, "gpu_error": "RuntimeError: No CUDA GPUs are available"}
    found = only(told(blind, GROUP, device(), gpus=True))
    assert (found.name, found.status) == ("gpus-not-usable", Status.FAILURE)
    assert found.why == blind["gpu_error"]
    assert found == snapshot
    assert only(told(blind, GROUP, device(), gpus=False)).status is Status.OK


# ---- the trial itself


def run(program: str, **fields: Any) -> Trial:
    return try_torch([sys.executable, "-c", program], {}, **fields)


def test_records_are_told_from_what_a_library_prints() -> None:
    line = MARK + '{"stage": "group"}'
    trial = run(f"print('hello'); print({line!r})")
    assert trial.records == ({"stage": "group"},)
    assert trial.code == 0


def test_a_trial_that_hangs_is_ended_with_what_it_started() -> None:
    line = MARK + '{"stage": "import", "begun": true}'
    program = (
        "import subprocess, sys, time\n"
        f"print({line!r}, flush=True)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "time.sleep(60)\n"
    )
    trial = run(program, within_s=5.0)
    assert trial.code is None
    assert trial.last_begun == "import"


def test_a_trial_that_cannot_be_ended_is_not_waited_for() -> None:
    """As one in an uninterruptible wait: here a process that the kill misses keeps the output open."""
    program = (
        "import json, subprocess, sys, time\n"
        "code = 'import time; time.sleep(600)'\n"
        "held = subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
        f"print({MARK!r} + json.dumps(dict(stage='import', begun=True, pid=held.pid)), flush=True)\n"
        "time.sleep(60)\n"
    )
    trial = run(program, within_s=5.0)
    os.kill(trial.records[0]["pid"], signal.SIGKILL)
    assert trial.code is None
    assert trial.last_begun == "import"


@pytest.mark.parametrize("bad", ['{"stage": "gro', "3", "{}"])
def test_a_line_that_is_no_record_is_passed_over(bad: str) -> None:
    trial = run(f"print({MARK + bad!r}); print({MARK + json.dumps(GROUP)!r})")
    assert trial.records == (GROUP,)


def test_a_hang_is_told_also_where_the_devices_are_silent(
    site: SitePackages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent() -> Node:
        raise DevicesSilent

    trial = Trial(records=(begun("device"),), code=None, seconds=60.0)
    monkeypatch.setattr(torch_at_work, "try_torch", lambda *_: trial)
    (check,) = torch_at_work.CHECKS
    assert only(list(check.run(surroundings(site, look=silent)))).name == "torch-hangs"


@pytest.mark.parametrize(("ending", "code"), [("os.abort()", -6), ("sys.exit(3)", 3)])
def test_how_a_trial_ended(ending: str, code: int) -> None:
    trial = run(f"import os, sys; print('oops hf_0123456789abcdefghij', file=sys.stderr); {ending}")
    assert trial.code == code
    assert trial.complaint.startswith("oops")
    assert "hf_0123" not in trial.complaint
