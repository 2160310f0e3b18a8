"""What is said where machines differ."""

from typing import Any

import pytest

from torchmuster import __version__
from torchmuster.finding import Finding, Status
from torchmuster.launch import protocol
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher import compare_nodes
from torchmuster.launch.launcher.host import ConnectedHost

SPEC = JobSpec(name="job", command=("train.py", "--epochs", "3"), folder="/home/ana/project")


def fingerprint(script: str = "s", code: str = "c") -> protocol.Fingerprint:
    return protocol.Fingerprint(script_sha256=script, code_sha256=code)


def node(
    name: str,
    fingerprint: protocol.Fingerprint | None = None,
    **fields: Any,
) -> ConnectedHost:
    known: dict[str, Any] = {
        "host": name,
        "system": "linux",
        "python": "3.11.7",
        "torch": "2.13.0+cu126",
        "torchmuster": __version__,
        "cores": 8,
        "clock_unix_s": 0.0,
        "addresses": (),
    }
    host = ConnectedHost(0, name, None, "part")  # type: ignore[arg-type]
    host.record = protocol.NodeRecord(**{**known, **fields})
    host.prepared = protocol.Prepared(ranks=1, devices=("CPU",), fingerprint=fingerprint)
    return host


def compared(*nodes: ConnectedHost, spec: JobSpec = SPEC) -> list[Finding]:
    return compare_nodes.compare_all_nodes(nodes, spec)


MODULE = JobSpec(name="job", command=("pkg.train",), module=True, folder="/home/ana/project")
PROGRAM = JobSpec(name="job", command=("bash", "train.sh"), program=True, folder="/home/ana")
NOWHERE = fingerprint(script="", code="")


@pytest.mark.parametrize(
    ("specs", "spec"),
    [
        ([], SPEC),
        ([{"fingerprint": fingerprint()}, {"fingerprint": fingerprint(), "cores": 96}], SPEC),
        ([{}, {"python": "3.11.2"}], SPEC),
        ([{}, {"torch": "2.13.0+cpu"}], SPEC),
        ([{"fingerprint": NOWHERE}] * 2, MODULE),  # Python's own error is clearer
        ([{"fingerprint": NOWHERE}, {"fingerprint": fingerprint()}], PROGRAM),  # found in PATH
    ],
)
def test_hosts_that_can_work_together(specs: list[dict[str, Any]], spec: JobSpec) -> None:
    nodes = [node(name, **fields) for name, fields in zip("ab", specs, strict=False)]
    assert compared(*nodes, spec=spec) == []


@pytest.mark.parametrize(
    ("first", "second", "spec", "name", "fix"),
    [
        ({}, {"system": "win32"}, SPEC, "mixed-operating-systems", "WSL2"),
        ({}, {"torchmuster": "9.9.9"}, SPEC, "torchmuster-version", f"torchmuster=={__version__} "),
        ({}, {"torch": None}, SPEC, "torch-missing", "torch==2.13.0  # on b"),
        ({"torch": None}, {"torch": None}, SPEC, "torch-missing", "'torch>=2.12'  # on a and b"),
        ({}, {"torch": "2.11.0+cpu"}, SPEC, "torch-missing", "torch==2.13.0  # on b"),
        ({}, {"torch": "2.14.0+cpu"}, SPEC, "torch-version", "torch==2.13.0"),
        ({}, {"python": "3.12.1"}, SPEC, "python-version", ""),
        ({"fingerprint": fingerprint()}, {"fingerprint": NOWHERE}, SPEC, "script-missing", "copy"),
        ({"fingerprint": NOWHERE}, {"fingerprint": NOWHERE}, SPEC, "script-missing", "copy"),
        ({"fingerprint": fingerprint()}, {"fingerprint": NOWHERE}, MODULE, "script-missing", ""),
        (
            {"fingerprint": fingerprint()},
            {"fingerprint": fingerprint(code="x")},
            SPEC,
            "code-differs",
            "copy /home/ana/project from a to b",
        ),
    ],
)
def test_a_difference_is_one_finding_with_its_fix(
    first: dict[str, Any], second: dict[str, Any], spec: JobSpec, name: str, fix: str
) -> None:
    (finding,) = compared(node("a", **first), node("b", **second), spec=spec)
    assert finding.name == name
    is_warning = name == "python-version"
    assert finding.status is (Status.WARNING if is_warning else Status.FAILURE)
    assert fix in finding.fix
    assert "b" in finding.what


def test_another_protocol_is_refused() -> None:
    record = node("b", torchmuster="9.9.9").record
    assert record is not None
    trouble = compare_nodes.other_protocol("b", protocol.Hello(protocol=99, record=record))
    assert (trouble.name, trouble.exit_code) == ("other-protocol", 2)
    assert "version 9.9.9" in trouble.why
    assert f"pip install torchmuster=={__version__} " in trouble.fix
