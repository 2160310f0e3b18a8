"""What is said where machines differ."""

from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster import __version__
from torchmuster.finding import Finding, Status
from torchmuster.launch import protocol
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher import compare_nodes
from torchmuster.launch.launcher.compare_nodes import NodeDescription

SPEC = JobSpec(name="job", command=("train.py", "--epochs", "3"), folder="/home/ana/project")


def fingerprint(script: str = "s", code: str = "c") -> protocol.Fingerprint:
    return protocol.Fingerprint(script_sha256=script, code_sha256=code)


def node(
    name: str,
    fingerprint: protocol.Fingerprint | None = None,
    **fields: Any,
) -> NodeDescription:
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
    return NodeDescription(
        name=name,
        record=protocol.NodeRecord(**{**known, **fields}),
        fingerprint=fingerprint,
    )


def compared(*nodes: NodeDescription, spec: JobSpec = SPEC) -> list[Finding]:
    return compare_nodes.compare_all_nodes(nodes, spec)


MODULE = JobSpec(name="job", command=("pkg.train",), module=True, folder="/home/ana/project")
SPACED = JobSpec(name="job", command=("scripts/my train.py",), folder="/home/ana/a project")
NOWHERE = fingerprint(script="", code="")


@pytest.mark.parametrize(
    ("nodes", "spec"),
    [
        ([], SPEC),
        ([node("a", fingerprint()), node("b", fingerprint(), host="other", cores=96)], SPEC),
        ([node("a"), node("b", python="3.11.2")], SPEC),
        ([node("a", NOWHERE), node("b", NOWHERE)], MODULE),  # Python's own error is clearer
        ([node("a", fingerprint()), node("b", fingerprint(code=""))], SPEC),  # too large to compare
        ([node("a", fingerprint(code="")), node("b", fingerprint())], SPEC),
    ],
)
def test_hosts_that_can_work_together(nodes: list[NodeDescription], spec: JobSpec) -> None:
    assert compared(*nodes, spec=spec) == []


@pytest.mark.parametrize(
    ("nodes", "spec", "name"),
    [
        ([node("a"), node("b", system="win32"), node("c")], SPEC, "mixed-operating-systems"),
        ([node("a"), node("b", torch=None)], SPEC, "torch-missing"),
        ([node("a", torch=None), node("b", torch=None)], SPEC, "torch-missing"),
        ([node("a"), node("b", torch="2.11.0+cpu")], SPEC, "torch-missing"),
        ([node("a"), node("b", torch="2.14.0+cpu")], SPEC, "torch-version"),
        ([node("a"), node("b", torch="2.13.0+cpu")], SPEC, "torch-build"),
        ([node("a"), node("b", python="3.12.1")], SPEC, "python-version"),
        ([node("a", fingerprint()), node("b", NOWHERE)], SPEC, "script-missing"),
        ([node("a", NOWHERE), node("b", NOWHERE)], SPEC, "script-missing"),
        ([node("a", fingerprint()), node("b", NOWHERE)], MODULE, "script-missing"),
        ([node("a", fingerprint()), node("ana@b", fingerprint(script="x"))], SPEC, "code-differs"),
        ([node("a", fingerprint()), node("b", fingerprint(code="x"))], SPACED, "code-differs"),
    ],
)
def test_a_difference_is_one_finding_with_its_fix(
    nodes: list[NodeDescription], spec: JobSpec, name: str, snapshot: SnapshotAssertion
) -> None:
    (finding,) = compared(*nodes, spec=spec)
    assert finding.name == name
    is_warning = name in ("torch-build", "python-version")
    assert finding.status is (Status.WARNING if is_warning else Status.FAILURE)
    assert finding.as_json() == snapshot


def test_another_torchmuster_is_refused() -> None:
    (finding,) = compared(node("a"), node("b", torchmuster="9.9.9"))
    assert (finding.name, finding.status) == ("torchmuster-version", Status.FAILURE)
    assert f"pip install torchmuster=={__version__} " in finding.fix


def test_another_protocol_is_refused(snapshot: SnapshotAssertion) -> None:
    trouble = compare_nodes.other_protocol(
        "b", protocol.Hello(protocol=99, record=node("b", torchmuster="9.9.9").record)
    )
    assert (trouble.name, trouble.exit_code) == ("other-protocol", 2)
    assert trouble.what.replace(f" {protocol.PROTOCOL}", " PROTOCOL") == snapshot
    assert trouble.why.replace(__version__, "VERSION") == snapshot
    assert f"pip install torchmuster=={__version__} " in trouble.fix


@pytest.mark.timeout(120)
def test_ten_thousand_hosts_that_all_differ_are_reported_briefly() -> None:
    nodes = [node("head", fingerprint())]
    for number in range(9_999):
        nodes.append(
            node(
                f"n{number}",
                fingerprint(script=f"s{number % 3}", code=f"c{number}"),
                torch=None if number % 5 == 0 else f"2.{number % 9}.0",
                python=f"3.{number % 50}.0",
                system="win32" if number % 7 == 0 else "linux",
            )
        )
    findings = compared(*nodes)
    assert len(findings) == 4
    assert max(len(one.what) + len(one.why) + len(one.fix) for one in findings) < 800
