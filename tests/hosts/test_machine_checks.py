"""The checks of one machine on real hosts: silent where all is well, and right about real faults."""

import json
import sys
import tempfile
from pathlib import Path

import pytest

from hosts.conftest import MakeLab
from hosts.faults import (
    DockerBridge,
    Fault,
    Loss,
    SecondNetwork,
    injected,
)
from hosts.host import Host
from hosts.lab import Lab
from nightly import nightly_except

# Looks at the machine it runs on, and prints the name and the fix of what is more than a row in a table.
_PROGRAM = """
import importlib, json, os, sys
from torchmuster.diagnose.check import Surroundings
from torchmuster.diagnose.host_checks import run_checks
checks = [
    check
    for subject in sys.argv[1].split(",")
    for check in importlib.import_module(f"torchmuster.diagnose.machine.{subject}").CHECKS
]
if sys.argv[2:] == ["nobody"]:  # only now: the folders of Python may be root's
    "name".encode("idna")
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
examined = run_checks(Surroundings(), checks)
print(json.dumps([one.as_json() for one in examined]))
"""
SUBJECTS = (
    "shared_memory,memory,processors,limits,storage,names,network_interfaces,firewall,ports,"
    "platforms"
)
SIGNIFICANT = ("warning", "failure")


def examined(
    host: Host, subjects: str = SUBJECTS, *, user: str = "root", cwd: Path | None = None
) -> dict[str, dict[str, str]]:
    """Return the findings on a host by name."""
    words = [sys.executable, "-c", _PROGRAM, subjects, user]
    with tempfile.TemporaryDirectory() as home:  # its own: in /tmp others may have left a .cache
        Path(home).chmod(0o777)  # nobody writes there
        done = host.run(words, check=True, cwd=cwd, env={"HOME": home})
    return {one["name"]: one for one in json.loads(done.stdout)}


def significant(findings: dict[str, dict[str, str]]) -> set[str]:
    return {name for name, one in findings.items() if one["status"] in SIGNIFICANT}


@pytest.fixture
def lab(make_lab: MakeLab) -> Lab:
    return make_lab(2, ssh=False)


@pytest.mark.parametrize("user", ["root", pytest.param("nobody", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "fault",
    nightly_except(
        ["None"],
        {
            repr(fault): fault
            for fault in (None, DockerBridge(), SecondNetwork(), Loss(host="node1", percent=5))
        },
    ),
)
def test_no_false_alarms(lab: Lab, fault: Fault | None, user: str) -> None:
    with injected(lab, *([fault] if fault else [])):
        findings = examined(lab.hosts[0], user=user, cwd=Path("/tmp"))
    assert significant(findings) == set()
    assert not {"check-failed", "check-hangs"} & set(findings)
