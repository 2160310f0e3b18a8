"""Test torch in a separate process: import, a process group of one rank, matrix products."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
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
_LAST_WORDS_S = 2.0
_TAIL_LINES = 6
# An idle device below this share of the median of its model is slow.
_SLOW = 0.8

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
    busy: set[int] = set()
    gpus = False
    with contextlib.suppress(DevicesSilent):  # then torch's own result is all there is
        node = surroundings.look()
        busy = {device.index for device in node.accelerators if device.compute_processes}
        gpus = node.main_kind in (DeviceKind.CUDA, DeviceKind.ROCM)
    yield from judge_trial(trial, python=surroundings.python, gpus=gpus, busy=busy)


def try_torch(
    words: Sequence[str], environment: Mapping[str, str], *, within_s: float = DEADLINE_S
) -> Trial:
    """Run the probe and return its result; if it hangs, kill it with all its children."""
    began = time.monotonic()
    process = subprocess.Popen(
        list(words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        start_new_session=True,
    )
    code: int | None = None
    try:
        out, err = process.communicate(timeout=within_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        _end(process)
        out, err = _last_words(process)
    return Trial(
        records=tuple(_records(out.decode(errors="replace").splitlines())),
        code=code,
        complaint=_tail(err.decode(errors="replace")),
        seconds=time.monotonic() - began,
    )


def _last_words(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Return the output so far; a process in uninterruptible I/O may not die from SIGKILL yet."""
    try:
        return process.communicate(timeout=_LAST_WORDS_S)
    except subprocess.TimeoutExpired as error:
        process.poll()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return error.output or b"", error.stderr or b""


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


def _tail(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return redact_text("\n".join(lines[-_TAIL_LINES:]))


def judge_trial(
    trial: Trial, *, python: str, gpus: bool, busy: Collection[int] = ()
) -> Iterator[Finding]:
    """Yield the findings of a trial; ``busy`` are devices in use by others, which may be slow."""
    found = [
        *_ended_early(trial, python),
        *_group(trial),
        *(item for record in trial.of("import") for item in _gpus_seen(record, gpus)),
        *(item for record in trial.of("device") for item in _device(record)),
        *_slow(trial.of("device"), busy),
    ]
    yield from found
    if all(finding.status is Status.NOTE for finding in found):
        imported = next(iter(trial.of("import")), {})
        devices = [
            f"{record['name']} {record['gflops']:.0f} GFLOP/s" for record in trial.of("device")
        ]
        words = (
            f"imported in {imported.get('seconds', 0.0):.1f} s; gloo works; {', '.join(devices)}"
        )
        yield Finding(name="torch-at-work", status=Status.OK, what=words)


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
    name = record["name"]
    if record.get("error"):
        missing = "no kernel image" in str(record["error"])
        yield Finding(
            name="gpu-not-in-build" if missing else "device-fails",
            status=Status.FAILURE,
            what=f"{name} cannot multiply matrices",
            why=str(record["error"]),
            fix="install a torch build for this GPU"
            if missing
            else "sudo dmesg | grep -i xid  # shows the driver's errors",
            evidence=f"this torch has code for {', '.join(record['built_for'])}"
            if record.get("built_for")
            else "",
        )
    elif record["wrong"]:
        yield finding(
            "device-computes-wrongly",
            subject=name,
            wrong=record["wrong"],
            compared=record["compared"],
        )


def _slow(records: Sequence[Mapping[str, Any]], busy: Collection[int]) -> Iterator[Finding]:
    """Compare GPUs of one model with each other, as normal speed differs between models."""
    by_model: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        if record.get("gflops") and record.get("index") not in (None, *busy):
            by_model.setdefault(record["model"], []).append(record)
    for alike in by_model.values():
        median = statistics.median_high(record["gflops"] for record in alike)
        for record in alike:
            if record["gflops"] >= _SLOW * median:
                continue
            yield finding(
                "device-slow",
                device=record["name"],
                share=record["gflops"] / median,
                index=record["index"],
                gflops=record["gflops"],
                median=median,
            )


CHECKS = (
    Check(
        name="torch-at-work",
        asks="Can torch be imported, create a process group, and multiply correctly on each "
        "device?",
        run=_run,
        cost=Cost.SECONDS,
        deadline_s=DEADLINE_S + _LAST_WORDS_S + LOOK_WITHIN_S + 5,
    ),
)
