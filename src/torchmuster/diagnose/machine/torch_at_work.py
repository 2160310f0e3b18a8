"""Test torch in a separate process: import, a process group of one rank, matrix products."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchmuster.devices.model import DeviceKind
from torchmuster.diagnose.check import LOOK_WITHIN_S, Check, Cost, DevicesSilent, Surroundings
from torchmuster.diagnose.machine import installed
from torchmuster.diagnose.rank_record import MARK
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status
from torchmuster.redaction import redact_text

PROBE = "torchmuster.diagnose.probes.torch_at_work"
DEADLINE_S = 60.0
_KILLED_WITHIN_S = 2.0
_TAIL_LINES = 6

_DOING = {
    "": "starting",
    "import": "importing torch",
    "group": "creating a gloo process group of one rank",
    "device": "multiplying matrices",
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of the probe: its records, its exit code, and the tail of its stderr."""

    records: tuple[Mapping[str, Any], ...] = ()
    code: int | None = 0  # None: killed after the deadline
    complaint: str = ""
    seconds: float = field(default=0.0, compare=False)

    def of(self, stage: str) -> list[Mapping[str, Any]]:
        """Return the records of a completed stage."""
        return [
            record
            for record in self.records
            if record.get("stage") == stage and "begun" not in record
        ]

    @property
    def last_begun(self) -> str:
        """The stage it was in when it exited."""
        return next(
            (str(record["stage"]) for record in reversed(self.records) if "begun" in record), ""
        )


def _run(surroundings: Surroundings) -> Iterator[Finding]:
    if installed.torch_folder(surroundings) is None:
        return  # reported by torch-whole
    trial = try_torch([surroundings.python, "-P", "-m", PROBE], surroundings.environment)
    gpus = False
    with contextlib.suppress(DevicesSilent):  # then torch's own result is all there is
        gpus = surroundings.look().main_kind in (DeviceKind.CUDA, DeviceKind.ROCM)
    yield from judge_trial(trial, python=surroundings.python, gpus=gpus)


def try_torch(
    command: Sequence[str], environment: Mapping[str, str], *, within_s: float = DEADLINE_S
) -> Trial:
    """Run the probe and return its result; if it hangs, kill it with all its children."""
    began = time.monotonic()
    # Files, not pipes: what the kill misses, such as a process in a dead disk, cannot block reading.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=dict(environment),
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(within_s)
        except subprocess.TimeoutExpired:
            _end(process)
        output.seek(0)
        errors.seek(0)
        return Trial(
            records=tuple(_records(output.read().decode(errors="replace").splitlines())),
            code=code,
            complaint=_tail(errors.read().decode(errors="replace")),
            seconds=time.monotonic() - began,
        )


def _records(lines: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        if line.startswith(MARK):
            with contextlib.suppress(ValueError):  # a line cut off when it was killed
                record = json.loads(line[len(MARK) :])
                if isinstance(record, dict) and "stage" in record:
                    yield record


def _end(process: subprocess.Popen[bytes]) -> None:
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it may be in uninterruptible I/O
        process.wait(_KILLED_WITHIN_S)


def _tail(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return redact_text("\n".join(lines[-_TAIL_LINES:]))


def judge_trial(trial: Trial, *, python: str, gpus: bool) -> list[Finding]:
    """Return the findings of a trial; one with status OK if it found no fault."""
    findings = [*_ended_early(trial, python), *_group(trial)]
    for record in trial.of("import"):
        findings += _gpus_seen(record, gpus)
    speeds = []
    for record in trial.of("device"):
        findings += _device(record)
        speeds.append(f"{record['name']} {record.get('gflops', 0.0):.0f} GFLOP/s")
    if not findings:
        imported = next(iter(trial.of("import")), {})
        seconds = imported.get("seconds", 0.0)
        seen = f"imported in {seconds:.1f} s; gloo works; {', '.join(speeds)}"
        findings.append(Finding(name="torch-at-work", status=Status.OK, what=seen))
    return findings


def _ended_early(trial: Trial, python: str) -> Iterator[Finding]:
    doing = _DOING.get(trial.last_begun, trial.last_begun)
    if trial.code is None:
        yield finding("torch-hangs", doing=doing, seconds=trial.seconds, evidence=trial.complaint)
    if not trial.code:
        return
    end = f"exit code {trial.code}"
    if trial.code < 0:
        end = f"signal {-trial.code}"
    last_line = trial.complaint.rpartition("\n")[2] or end
    why = f"every script on this host fails the same way ({end})"
    fix = (
        "muster doctor  # its other findings often show the cause\n"
        f"{python} -m pip install --force-reinstall torch"
    )
    from torchmuster.known_errors.explain import explain_text  # slow, and rarely needed

    for known in explain_text(trial.complaint, host="this host")[:1]:
        why += f"; {known.what}: {known.why}"
        fix = known.fix
    yield Finding(
        name="torch-import-fails" if trial.last_begun in ("", "import") else "torch-crashes",
        status=Status.FAILURE,
        what=f"torch fails while {doing}: {last_line}",
        why=why,
        fix=fix,
        evidence=trial.complaint,
    )


def _group(trial: Trial) -> Iterator[Finding]:
    for record in trial.of("group"):
        if record.get("error"):
            yield finding("gloo-fails", why=str(record["error"]))


def _gpus_seen(record: Mapping[str, Any], gpus: bool) -> Iterator[Finding]:
    if gpus and record.get("gpu_build") and not record.get("devices"):
        yield finding(
            "gpus-not-usable", why=str(record.get("gpu_error") or "the driver reports no GPU")
        )


def _device(record: Mapping[str, Any]) -> Iterator[Finding]:
    device, error = record["name"], str(record.get("error") or "")
    if "no kernel image" in error:
        built_for = ", ".join(record.get("built_for", ()))
        yield finding("gpu-not-in-build", device=device, error=error, built_for=built_for)
    elif error:
        yield finding("device-fails", device=device, error=error)
    elif record["wrong"]:
        yield finding(
            "device-computes-wrongly",
            subject=device,
            wrong=record["wrong"],
            compared=record["compared"],
        )


CHECKS = (
    Check(
        name="torch-at-work",
        asks="Can torch be imported, create a process group, and multiply correctly on each "
        "device?",
        run=_run,
        cost=Cost.SECONDS,
        deadline_s=DEADLINE_S + _KILLED_WITHIN_S + LOOK_WITHIN_S + 5,
    ),
)
