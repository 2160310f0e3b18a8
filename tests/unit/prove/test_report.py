"""The result of a proof as a screen, a page and JSON."""

import json
from pathlib import Path

from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import Impossible
from torchmuster.finding import Finding, Status
from torchmuster.prove import report
from torchmuster.prove.comparing import Difference
from torchmuster.prove.explanations import finding_of
from torchmuster.prove.proof import Proof, Result, _result
from torchmuster.prove.records import ProofRequest
from unit.prove.made_up_trials import trial


def proof() -> Proof:
    def lost(name: str, step: int) -> Result:
        found = Difference(
            kind="learning-rate",
            step=step,
            what=f"resumed from step {step - 1}, step {step}: the learning rate is 0.1 instead of 0.05",
            also=("weights",),
            line="train.py:31",
            keys=("model", "optimizer"),
        )
        return Result(
            name=name,
            outcome="fail",
            finding=finding_of("resume", found, allowed=False),
            difference=found,
        )

    equal = Finding(name="prove-determinism", status=Status.OK, what="determinism: bitwise equal")
    request = ProofRequest(
        only=("determinism", "resume"),
        command=("train.py", "--lr", "<b>"),
        module=False,
        with_run_folder=False,
        folder="/work",
        into="/work/prove/x",
        steps=12,
        ranks=2,
        device="cpu",
    )
    return Proof(
        request=request,
        baseline=trial(range(1, 13), saves=(3, 6)),
        results=[
            Result(name="determinism", outcome="pass", finding=equal),
            lost("resume.killed", 7),
            lost("resume.terminated", 4),
        ],
        runs=6,
        took_s=5.0,
    )


def test_a_difference_that_two_stops_show_appears_once(snapshot: SnapshotAssertion) -> None:
    text = report.proof_screen(proof(), Path("prove/x"), width=100, colour=False)
    assert text == snapshot
    assert text.count("failure ") == 1


def test_json_has_the_difference() -> None:
    found = report.proof_json(proof(), Path("prove/x"))
    assert found["passed"] is False
    results = found["results"]
    assert isinstance(results, list)
    assert (results[0]["outcome"], results[0]["difference"]) == ("pass", None)
    assert results[1]["name"] == "resume.killed"
    difference = results[1]["difference"]
    assert (difference["kind"], difference["step"], difference["line"]) == (
        "learning-rate",
        7,
        "train.py:31",
    )
    json.dumps(found)


def test_the_page_shows_curves_and_escapes_text() -> None:
    page = report.proof_page(proof())
    assert "undisturbed" in page
    assert "<svg" in page
    assert "<b>" not in page.replace('<b class="', "")


def test_a_proof_with_a_check_that_was_not_tested_does_not_fail() -> None:
    result = _result("resume", Impossible("the script saved no checkpoint"), allowed=())
    assert (result.outcome, result.finding.status) == ("not tested", Status.NOTE)
    made = proof()
    made.results = [result]
    assert not made.failed


def test_a_difference_that_is_allowed_is_a_note() -> None:
    difference = Difference(kind="same-data", step=1, what="50 %")
    result = _result("ranks.same-data", difference, allowed=("same-data",))
    assert (result.outcome, result.finding.status) == ("pass", Status.NOTE)
