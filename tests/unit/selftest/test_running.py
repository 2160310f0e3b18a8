"""The checks run one by one in processes of their own, within their time, and leave nothing behind."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from patience import GIVE_UP_S
from torchmuster.errors import Impossible, MusterError, TooFewDevices
from torchmuster.selftest import running
from torchmuster.selftest.assumptions import Assumption, known_assumptions, status_of
from torchmuster.selftest.check import Check, Facts, NotHere, Outcome, Place
from torchmuster.selftest.checks.all_checks import CHECKS
from torchmuster.selftest.hardware import NEEDS, Hardware
from torchmuster.selftest.one_check import judge_check
from torchmuster.selftest.record import (
    CheckResult,
    SelftestRecord,
    make_record,
    read_record,
    write_record,
)

HERE = Hardware(
    device="cpu",
    ranks=2,
    has=("nothing",),
    description={"cpu": "a CPU"},
    versions={"torch": "2.13.0"},
)


def _check(measure: object = None, **changes: object) -> Check:
    found = {
        "id": "strategies",
        "question": "is it so?",
        "fault": "it is not",
        "needs": (),
        "seconds": 1,
        "measure": measure or (lambda place, planted: {"good": not planted}),
        "judge": lambda facts: Outcome(confirmed=facts["good"], says="it is so"),
    }
    return Check(**{**found, **changes})  # type: ignore[arg-type]


def _place(folder: Path) -> Place:
    return Place(device="cpu", ranks=2, has=frozenset({"nothing"}), folder=str(folder))


def test_a_planted_fault_refutes(tmp_path: Path) -> None:
    place = _place(tmp_path)
    assert judge_check(_check(), place, planted=False).verdict == "confirmed"
    assert judge_check(_check(), place, planted=True).verdict == "refuted"


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (NotHere("peft is not installed"), "not run"),
        (TooFewDevices("2 GPUs requested, 1 is free"), "not run"),
        (MusterError("the ranks failed"), "broken"),
        (KeyError("findings"), "broken"),
    ],
)
def test_an_error_is_a_result(error: Exception, verdict: str, tmp_path: Path) -> None:
    def measure(place: Place, planted: bool) -> Facts:
        raise error

    found = judge_check(_check(measure), _place(tmp_path), planted=False)
    assert found.verdict == verdict
    assert found.says


def test_what_does_not_fit_is_not_run() -> None:
    found = running.run_checks(
        [_check(needs=("2 gpus", "gpu")), _check(seconds=1000)], HERE, minutes=1
    )
    assert [one.verdict for one in found] == ["not run", "not run"]
    assert "2 GPUs and 1 GPU" in found[0].says
    assert "--minutes" in found[1].says


def test_a_check_that_takes_too_long_ends_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    program = f"import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); open({str(child)!r}, 'w').write(str(p.pid)); time.sleep(600)"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(running, "_SHORTEST_LIMIT_S", 3.0)
    monkeypatch.setattr(running, "_TIMES_AS_LONG", 1)
    (found,) = running.run_checks([_check()], HERE, minutes=1)
    assert found.verdict == "broken"
    pid = int(child.read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=GIVE_UP_S)


def test_a_check_whose_process_dies_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (found,) = running.run_checks([_check()], HERE, minutes=1)
    assert found.verdict == "broken"
    assert "exit code 1" in found.says


def test_a_result_file_has_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu7.lab.example")
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    monkeypatch.chdir(tmp_path)
    says = f"{tmp_path}/x.py: rank 0 on gpu7.lab.example and gpu7 (10.1.2.3, fe80::1:2) of ada, bob@node2.lab.example: GPU-7d3a1c55-0f0e-4b6c-9d4e-aa00bb11cc22, token=hf_abcdefghijklmnopqrst"
    result = CheckResult(id="hang", verdict="broken", says=says)
    path = tmp_path / "result.json"
    record = make_record(HERE, [result], seconds=90, planted=False)
    write_record(path, record, hosts=["bob@node2:4"])
    text = path.read_text()
    assert not [
        word
        for word in (
            "gpu7",
            "10.1",
            "fe80",
            "ada",
            "7d3a1c55",
            "hf_abc",
            "bob",
            "node2",
            "lab.example",
            str(tmp_path),
        )
        if word in text
    ], text
    found = read_record(path)
    assert found.minutes == 1.5
    assert found.checks[0].verdict == "broken"


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 99}', "[" * 100_000])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(Impossible):
        read_record(path)


def _record(verdict: str, *has: str, planted: bool = False) -> SelftestRecord:
    result = CheckResult(id="strategies", verdict=verdict, says="")  # type: ignore[arg-type]
    here = Hardware(
        device="gpu",
        ranks=2,
        has=("nothing", *has),
        description={"gpus": ["2 x NVIDIA A100"]},
        versions={"torch": "2.13.0"},
    )
    return make_record(here, [result], seconds=1, planted=planted)


def test_an_assumption_needs_its_hardware() -> None:
    one = Assumption(id="a", text="", shown_by="", needs=("2 gpus",), check="strategies")
    assert status_of(one, []) == "untested"
    assert status_of(one, [_record("confirmed", "gpu")]) == "untested"
    assert status_of(one, [_record("not run", "2 gpus")]) == "untested"
    assert status_of(one, [_record("refuted", "2 gpus", planted=True)]) == "untested"
    confirmed = status_of(one, [_record("confirmed", "gpu", "2 gpus")])
    assert confirmed.startswith("confirmed on 2 x NVIDIA A100 (torch 2.13.0, ")
    both = status_of(one, [_record("confirmed", "2 gpus"), _record("refuted", "2 gpus")])
    assert both.startswith("refuted on")


def test_the_assumptions_are_consistent() -> None:
    known = known_assumptions()
    ids = [one.id for one in known.all]
    assert len(ids) == len(set(ids)) > 100
    assert {need for one in known.all for need in one.needs} <= set(NEEDS)
    checks = {one.id for one in CHECKS}
    assert {one.check for one in known.all} - {""} <= checks
    assert {need for one in CHECKS for need in one.needs} <= set(NEEDS)
    assert len(checks) == len(CHECKS)


def test_committed_results_can_be_read() -> None:
    folder = Path(__file__).parents[3] / "docs" / "measured" / "selftest"
    for path in folder.glob("*.json"):
        record = read_record(path)
        assert {one.id for one in record.checks} <= {one.id for one in CHECKS}
        assert os.uname().nodename not in json.dumps(record.hardware)


def test_a_stopped_self_test_leaves_nothing_behind(tmp_path: Path) -> None:
    """SIGTERM to the command, while a check runs."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "torchmuster", "selftest", "out-of-memory", "--device", "cpu"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as started:
        assert started.stderr is not None
        for line in started.stderr:
            if line.startswith("1 of 1"):
                break
        started.terminate()
        started.stderr.read()
    assert started.returncode == 143
    assert list(tmp_path.glob("muster-selftest-*")) == []
