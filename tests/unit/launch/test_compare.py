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


def fingerprint(script: str = "s", code: str = "c", files: int = 7) -> protocol.Fingerprint:
    return protocol.Fingerprint(script_sha256=script, code_sha256=code, code_files=files)


def node(
    name: str,
    fingerprint: protocol.Fingerprint | None = None,
    **fields: Any,
) -> NodeDescription:
    known: dict[str, Any] = {
        "host": name,
        "user": "ana",
        "pid": 1,
        "system": "linux",
        "machine": "x86_64",
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


def only(*nodes: NodeDescription, spec: JobSpec = SPEC) -> Finding:
    (finding,) = compare_nodes.compare_all_nodes(nodes, spec)
    return finding


def test_machines_that_are_alike() -> None:
    alike = fingerprint()
    nodes = [node("a", alike), node("b", alike, user="root", host="other", cores=96)]
    assert compare_nodes.compare_all_nodes(nodes, SPEC) == []
    assert compare_nodes.compare_all_nodes([node("a"), node("b", python="3.11.2")], SPEC) == []
    assert compare_nodes.compare_all_nodes([], SPEC) == []


def test_different_operating_systems_are_refused_with_the_ways_out(
    snapshot: SnapshotAssertion,
) -> None:
    finding = only(node("a"), node("b", system="win32"), node("c"))
    assert finding.status is Status.FAILURE
    assert finding.name == "mixed-operating-systems"
    assert finding.as_json() == snapshot


def test_no_torch_is_refused_with_the_line_that_installs_the_same_one(
    snapshot: SnapshotAssertion,
) -> None:
    finding = only(node("a"), node("b", torch=None))
    assert (finding.name, finding.status) == ("torch-missing", Status.FAILURE)
    assert "pip install torch==2.13.0 " in finding.fix
    assert finding.as_json() == snapshot


def test_no_torch_anywhere(snapshot: SnapshotAssertion) -> None:
    finding = only(node("a", torch=None), node("b", torch=None))
    assert finding.name == "torch-missing"
    assert "pip install torch " in finding.fix
    assert finding.as_json() == snapshot


def test_another_release_of_torch_is_refused(snapshot: SnapshotAssertion) -> None:
    finding = only(node("a"), node("b", torch="2.14.0+cpu"), node("c", torch="2.14.0+cu126"))
    assert (finding.name, finding.status) == ("torch-version", Status.FAILURE)
    assert "pip install torch==2.13.0 " in finding.fix
    assert finding.as_json() == snapshot


def test_a_torch_below_the_floor_is_refused(snapshot: SnapshotAssertion) -> None:
    finding = only(node("a"), node("b", torch="2.11.0+cpu"), node("c", torch="2.6.0a0+nv25.01"))
    assert (finding.name, finding.status) == ("torch-too-old", Status.FAILURE)
    assert finding.as_json() == snapshot
    assert only(node("a", torch="2.11.0")).name == "torch-too-old"


def test_another_build_of_torch_is_a_warning(snapshot: SnapshotAssertion) -> None:
    finding = only(node("a"), node("b", torch="2.13.0+cpu"))
    assert (finding.name, finding.status) == ("torch-build", Status.WARNING)
    assert finding.as_json() == snapshot


def test_another_python_is_a_warning(snapshot: SnapshotAssertion) -> None:
    finding = only(node("a"), node("b", python="3.12.1"))
    assert (finding.name, finding.status) == ("python-version", Status.WARNING)
    assert finding.as_json() == snapshot


def test_another_torchmuster_is_a_warning(snapshot: SnapshotAssertion) -> None:
    finding = only(node("a"), node("b", torchmuster="9.9.9"))
    assert (finding.name, finding.status) == ("torchmuster-version", Status.FAILURE)
    assert f"pip install torchmuster=={__version__} " in finding.fix
    assert finding.what.replace(__version__, "VERSION") == snapshot


def test_another_protocol_is_refused(snapshot: SnapshotAssertion) -> None:
    trouble = compare_nodes.other_protocol(
        "b", protocol.Hello(protocol=99, record=node("b", torchmuster="9.9.9").record)
    )
    assert trouble.name == "other-protocol"
    assert trouble.what.replace(f" {protocol.PROTOCOL}", " PROTOCOL") == snapshot
    assert trouble.why.replace(__version__, "VERSION") == snapshot
    assert f"pip install torchmuster=={__version__} " in trouble.fix
    assert trouble.exit_code == 2
    assert b'"exit_code":2' in protocol.encode(protocol.Refused(trouble=trouble))


def test_a_script_that_is_missing_is_copied(snapshot: SnapshotAssertion) -> None:
    finding = only(node("a", fingerprint()), node("b", fingerprint(script="", code="x")))
    assert finding.status is Status.FAILURE
    assert finding.name == "script-missing"
    assert finding.fix == "rsync -ac /home/ana/project/ b:/home/ana/project/  # on a"
    assert finding.as_json() == snapshot


def test_a_script_that_is_nowhere(snapshot: SnapshotAssertion) -> None:
    missing = fingerprint(script="", code="")
    finding = only(node("a", missing), node("b", missing))
    assert finding.name == "script-missing"
    assert finding.as_json() == snapshot


def test_a_module_that_is_nowhere_is_left_to_python(snapshot: SnapshotAssertion) -> None:
    module = JobSpec(name="job", command=("pkg.train",), module=True, folder="/home/ana/project")
    missing = fingerprint(script="", code="")
    assert compare_nodes.compare_all_nodes([node("a", missing), node("b", missing)], module) == []
    finding = only(node("a", fingerprint()), node("b", missing), spec=module)
    assert finding.name == "script-missing"
    assert finding.fix == "rsync -ac /home/ana/project/ b:/home/ana/project/  # on a"
    assert finding.what == snapshot


def test_another_script_is_refused_and_told_once(snapshot: SnapshotAssertion) -> None:
    finding = only(node("a", fingerprint()), node("ana@b", fingerprint(script="x", code="y")))
    assert finding.status is Status.FAILURE
    assert finding.name == "script-differs"
    assert finding.fix == "rsync -ac /home/ana/project/ ana@b:/home/ana/project/  # on a"
    assert finding.as_json() == snapshot


def test_other_code_beside_the_script_is_refused(snapshot: SnapshotAssertion) -> None:
    spec = JobSpec(name="job", command=("scripts/my train.py",), folder="/home/ana/a project")
    finding = only(node("a", fingerprint()), node("b", fingerprint(code="x", files=9)), spec=spec)
    assert finding.status is Status.FAILURE
    assert finding.name == "code-differs"
    assert finding.fix == (
        "rsync -ac '/home/ana/a project/scripts/' b:'/home/ana/a project/scripts/'  # on a"
    )
    assert finding.as_json() == snapshot


def test_code_that_was_too_much_to_look_at_is_not_compared() -> None:
    nodes = [node("a", fingerprint()), node("b", fingerprint(code=""))]
    assert compare_nodes.compare_all_nodes(nodes, SPEC) == []
    assert compare_nodes.compare_all_nodes(nodes[::-1], SPEC) == []


@pytest.mark.timeout(120)
def test_ten_thousand_machines_that_all_differ_are_told_briefly(
    snapshot: SnapshotAssertion,
) -> None:
    nodes = [node("head", fingerprint())]
    nodes += [
        node(
            f"n{n}",
            fingerprint(script=f"s{n % 3}", code=f"c{n}"),
            torch=None if n % 5 == 0 else f"2.{n % 9}.0",
            python=f"3.{n % 50}.0",
            system="win32" if n % 7 == 0 else "linux",
        )
        for n in range(9_999)
    ]
    findings = compare_nodes.compare_all_nodes(nodes, SPEC)
    assert len(findings) == 5
    assert max(len(one.what) + len(one.why) + len(one.fix) for one in findings) < 800
    by_name = {one.name: one for one in findings}
    assert by_name["script-differs"].what == snapshot
    assert by_name["script-differs"].fix == snapshot
    assert by_name["python-version"].what == snapshot


def test_one_difference_of_many_machines_is_one_finding(snapshot: SnapshotAssertion) -> None:
    nodes = [node("a", fingerprint())]
    nodes += [node(f"n{n}", fingerprint(code="x")) for n in range(9_999)]
    finding = only(*nodes)
    assert finding.name == "code-differs"
    assert finding.what == snapshot
