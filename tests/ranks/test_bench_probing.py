"""A program that measures is asked and answered in types, rank by rank; one that fails says why."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.bench.probing import run_probe
from torchmuster.errors import MusterError

pytestmark = pytest.mark.ranks

PROGRAM = """
import json, os, sys
from torchmuster.plan.proof.fresh_ranks import leave_answer

request, answers = sys.argv[1:]
asked = json.load(open(request))
rank = int(os.environ["RANK"])
if asked["number"] < 0:
    raise ValueError("a number below nothing")
if asked["number"] or rank == 0:
    leave_answer(answers, rank, json.dumps({"rank": rank, "double": 2 * asked["number"]}))
"""


@dataclass(frozen=True, kw_only=True)
class Request:
    number: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    rank: int
    double: int


def ask(folder: Path, number: int) -> list[Answer]:
    (folder / "doubling.py").write_text(PROGRAM)
    return run_probe(
        "doubling", Request(number=number), Answer, ranks=2, folder=str(folder), doing="doubling"
    )


def test_answers_come_by_rank(own_machine: Path) -> None:
    assert ask(own_machine, 21) == [Answer(rank=0, double=42), Answer(rank=1, double=42)]


@pytest.mark.nightly
def test_a_rank_that_fails_says_why(own_machine: Path) -> None:
    with pytest.raises(MusterError) as trouble:
        ask(own_machine, -1)
    assert trouble.value.what == "doubling failed"
    assert "ValueError: a number below nothing" in trouble.value.why


@pytest.mark.nightly
def test_a_rank_that_says_nothing_is_no_answer(
    own_machine: Path, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(MusterError) as trouble:
        ask(own_machine, 0)
    assert trouble.value.why.startswith("only 1 of 2 ranks ")
    assert trouble.value == snapshot
