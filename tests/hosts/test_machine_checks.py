"""The checks of one machine on real hosts: silent where all is well, and right about real faults."""

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hosts.conftest import MakeLab
from hosts.faults import (
    DockerBridge,
    Fault,
    LinkCut,
    Loss,
    NameLeadsTo,
    SecondNetwork,
    injected,
    own_name_is_loopback,
    own_name_is_unknown,
)
from hosts.host import Host
from hosts.lab import Lab
from hosts.machine_faults import SilentNameServer, SmallFileSystem
from nightly import nightly_except
from torchmuster.units import MiB

# Looks at the machine it runs on, and prints the name and the fix of what is more than a row in a table.
_PROGRAM = """
import importlib, json, os, sys
from torchmuster.diagnose.check import Cost, Surroundings
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
examined = run_checks(Surroundings(), checks, at_most=Cost.SECONDS)
print(json.dumps([one.as_json() for each in examined for one in each.findings]))
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


def do_all(host: Host, fix: str) -> None:
    """Run a fix line by line, as root without sudo."""
    for line in fix.splitlines():
        host.run(["sh", "-c", re.sub(r"\bsudo ", "", line)], check=True)


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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (own_name_is_loopback("node1"), "name-is-loopback"),
        (own_name_is_unknown("node1"), "name-unresolvable"),
        (NameLeadsTo(host="node1", address="10.77.0.99"), "name-leads-elsewhere"),
    ],
    ids=lambda one: str(one),
)
def test_a_wrong_own_name_is_mended_by_its_fix(
    lab: Lab, tmp_path: Path, fault: Fault, name: str
) -> None:
    head = lab.hosts[0]
    kept = str(tmp_path / "hosts.before")  # the hosts of a lab share /etc with this machine
    with injected(lab, fault):
        findings = examined(head, "names")
        assert name in findings
        assert head.address in findings[name]["fix"]
        do_all(head, findings[name]["fix"].replace("/etc/hosts.before", kept))
        again = examined(head, "names")
        assert again["own-name"]["what"] == f"node1 is {head.address}"
        assert head.run(["getent", "hosts", "localhost"], check=True)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "subject", "name"),
    [
        (
            lambda folder: SmallFileSystem(host="node1", path="/dev/shm", size_bytes=64 * MiB),
            "shared_memory",
            "shared-memory-small",
        ),
        (
            lambda folder: SmallFileSystem(
                host="node1", path="/dev/shm", size_bytes=200 * MiB, used_bytes=180 * MiB
            ),
            "shared_memory",
            "shared-memory-full",
        ),
        (
            lambda folder: SmallFileSystem(
                host="node1", path=folder, size_bytes=MiB, used_bytes=MiB
            ),
            "storage",
            "run-folder-full",
        ),
        (
            lambda folder: SmallFileSystem(
                host="node1", path=folder, size_bytes=64 * MiB, read_only=True
            ),
            "storage",
            "run-folder-read-only",
        ),
        (lambda folder: SilentNameServer(host="node1"), "names", "reverse-lookup-slow"),
        (lambda folder: LinkCut(host="node1"), "network_interfaces", "no-carrier"),
    ],
    ids=[
        "shm small",
        "shm full",
        "disk full",
        "read-only",
        "name server",
        "no cable",
    ],
)
def test_faults(
    lab: Lab, tmp_path: Path, fault: Callable[[str], Fault], subject: str, name: str
) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    with injected(lab, fault(str(folder))):
        findings = examined(lab.hosts[0], subject, cwd=folder)
        assert significant(findings) == {name}
