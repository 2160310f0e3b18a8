"""Running ``muster check`` on a host of a lab and reading what it found; doing what a fix says."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hosts.host import Host
from hosts.lab import Lab
from muster_command import muster_argv


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a check found: the findings as JSON, the exit code, and how long it took."""

    findings: Sequence[dict[str, str]]
    exit_code: int
    seconds: float
    said: str

    def above_note(self) -> list[dict[str, str]]:
        return [one for one in self.findings if one["status"] in ("warning", "failure")]

    def named(self, name: str) -> list[dict[str, str]]:
        return [one for one in self.findings if one["name"] == name]


def check(lab: Lab, *flags: str, hosts: str = "", cwd: Path | None = None) -> Found:
    """Run ``muster check`` on the first host, for these hosts or for all of the lab."""
    names = hosts or ",".join(one.name for one in lab.hosts)
    words = ["--hosts", names, "--device", "cpu", *flags]
    work = cwd or lab.folder / "work"
    work.mkdir(exist_ok=True)
    began = time.monotonic()
    done = lab.hosts[0].run(
        muster_argv(["check", "--json", *words]),
        env={"NO_COLOR": "1", "COLUMNS": "200"},
        cwd=work,
    )
    seconds = time.monotonic() - began
    try:
        told: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise AssertionError(f"no JSON:\n{done.stdout}\n{done.stderr}") from None
    return Found(
        findings=told["findings"],
        exit_code=done.returncode,
        seconds=seconds,
        said=done.stdout + done.stderr,
    )


def names(finding: Mapping[str, str], words: Sequence[str]) -> bool:
    """Tell whether a finding has all these words in what it says."""
    told = f"{finding['what']}\n{finding['why']}\n{finding['evidence']}"
    return all(word in told for word in words)


def do_what_it_says(host: Host, fix: str, containing: str) -> str:
    """Run the lines of a fix that contain this text on a host, as a person there would."""
    lines = [line for line in fix.splitlines() if containing in line]
    assert lines, f"no line with {containing!r} in the fix:\n{fix}"
    # On a lab's host one is root and has no sudo.
    command = re.sub(r"\bsudo ", "", "\n".join(["set -e", *lines]))
    done = host.run(["sh", "-c", command])
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return command
