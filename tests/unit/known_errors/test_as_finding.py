"""Explanations as findings: what a user of ``muster doctor --explain`` reads."""

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import ExitCode
from torchmuster.finding import Status, exit_code, render
from torchmuster.known_errors.explain import (
    explain_text,
    explanation_finding,
    explanations_as_findings,
)

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
CLOSED = "RuntimeError: [/w/gloo/transport/tcp/pair.cc:553] Connection closed by peer"


def test_the_cause_comes_first_and_the_rest_are_notes() -> None:
    findings = explanations_as_findings(f"{CLOSED}\n{OOM}")
    assert [(one.name, one.status) for one in findings] == [
        ("gpu-out-of-memory", Status.WARNING),
        ("peer-died", Status.NOTE),
    ]
    assert findings[0].what.startswith("gpu-out-of-memory: ")
    assert findings[0].evidence == OOM


def test_to_have_explained_an_error_is_no_failure() -> None:
    assert exit_code(explanations_as_findings(OOM)) is ExitCode.GOOD


def test_how_to_make_sure_stands_before_how_to_mend_it() -> None:
    finding = explanation_finding(
        explain_text("OSError: [Errno 98] Address already in use\nport: 29511,")[0]
    )
    lines = finding.fix.splitlines()
    assert lines[0] == "to confirm:"
    assert lines[1].startswith("  ss -ltnp 'sport = :29511'")
    assert lines[2] == "to fix it:"
    assert "ss -ltnp" in lines[3]


def test_commands_survive_the_renderer() -> None:
    finding = explanation_finding(
        explain_text("RuntimeError: Gloo connectFullMesh failed with x, remote=[10.0.0.2]:5")[0]
    )
    shown = render([finding], width=40)
    for line in finding.fix.splitlines():
        assert line in shown


def test_an_unknown_text_says_so_and_what_to_collect() -> None:
    (finding,) = explanations_as_findings("the sky is green")
    assert finding.name == "unknown-error"
    assert finding.status is Status.NOTE
    assert finding.what.startswith("unknown: ")
    assert "muster doctor" in finding.fix
    assert "NCCL_DEBUG=WARN" in finding.fix
    assert "rank-<n>.log" in finding.fix
    assert finding.evidence == ""


def test_an_unknown_text_shows_the_script_s_own_exception() -> None:
    (finding,) = explanations_as_findings(f"Traceback …\nKeyError: 'loss'\n{CLOSED}")
    assert finding.name == "unknown-error"
    assert finding.evidence == "KeyError: 'loss'"
    assert "only follow from it" in finding.why


def test_silence_leads_on_to_a_check(snapshot: SnapshotAssertion) -> None:
    (finding,) = explanations_as_findings(" \n\n")
    assert (finding.name, finding.status) == ("no-error-text", Status.NOTE)
    assert finding.as_json() == snapshot
    commands = [line.partition("   #")[0] for line in finding.fix.splitlines()]
    assert {"muster check --hosts A,B", "muster run --hosts A,B train.py"} <= {*commands}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "socket.gaierror: [Errno -3] Temporary failure in name resolution",
            "muster doctor",
        ),
        ("ifa != nullptr. Unable to find address for: ens5", "muster check --hosts A,B"),
        ("DistNetworkError: Connection reset by peer", "muster check --hosts A,B"),
        ("DistNetworkError: Connection reset by peer", "muster run --hosts A,B train.py"),
        ("Gloo connectFullMesh failed with x, remote=[10.0.0.2]:5", "muster check --hosts A,B"),
        (
            "Gloo connectFullMesh failed with x, remote=[127.0.1.1]:5",
            "muster run --hosts A,B train.py",
        ),
        ("OSError: [Errno 98] Address already in use", "muster run --hosts A,B train.py"),
        ("Timed out waiting 40000ms for recv operation to complete", "muster check --hosts A,B"),
        ("ana@b: Permission denied (publickey).", "muster check --hosts ana@b,OTHER"),
    ],
)
def test_what_is_to_be_typed_next_stands_on_a_line_of_its_own(text: str, line: str) -> None:
    """What is said beside a command comes after a ``#``, so that the whole line can be copied."""
    lines = explanations_as_findings(text)[0].fix.splitlines()
    assert line in [one.partition("   #")[0].strip() for one in lines]
