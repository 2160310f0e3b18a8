"""Streams on real ranks: the same global batches for any number of them, and after a change of it."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from rank_group import RunRanks
from rank_programs import streaming
from rank_programs.streaming import together

pytestmark = pytest.mark.ranks


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """Files of lines, of unlike sizes."""
    count = itertools.count()
    for name, lines in {"a": 40, "b": 3, "c": 90}.items():
        said = "".join(f"line {next(count)} {'long ' * (one % 4)}\n" for one in range(lines))
        (tmp_path / f"{name}.txt").write_text(said)
    return str(tmp_path)


def test_steps_hold_the_same_samples_on_1_to_4_ranks(run_ranks: RunRanks, texts: str) -> None:
    wanted: list[tuple[str, dict[str, Any], list[int]]] = [
        ("numbers", {}, [1, 16, 17]),
        ("files", {}, [5]),
        ("packed", {}, [3]),
        ("numbers", {"workers": 1}, []),
    ]
    groups = {ranks: run_ranks(streaming.read, ranks, texts, wanted) for ranks in (1, 2, 3, 4)}
    for place, (name, _, stops) in enumerate(wanted):
        (alone,) = (answer[place] for answer in groups[1])
        first, second = together([alone[0]]), together([alone[1]])
        if name != "packed":  # where documents follow each other differently, so do rows
            assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)), (
                "the same in each epoch"
            )
        assert first != second, "in another order"
        if name == "numbers":
            assert sorted(itertools.chain(*first)) == list(range(203))
        for ranks, answers in groups.items():
            assert together([one[place][0] for one in answers]) == first, (name, ranks)
            assert together([one[place][1] for one in answers]) == second, (name, ranks)
            for which, stop in enumerate(stops):
                rest = together([one[place][2][which] for one in answers])
                assert rest == first[stop:], (name, ranks, stop)
    files = together([groups[1][0][1][0]])
    assert len(set(itertools.chain(*files))) == 133, "every line once"


def test_another_number_of_ranks_goes_on_where_the_first_stopped(
    run_ranks: RunRanks, texts: str
) -> None:
    names = ["numbers", "files", "packed"]
    whole = run_ranks(streaming.read, 1, texts, [(name, {}, []) for name in names])
    saved, same = run_ranks(streaming.states, 2, texts, names, 4)
    assert saved == same, "every rank can save the position of all"
    for ranks in (1, 3, 4):
        answers = run_ranks(streaming.go_on, ranks, texts, names, saved)
        for place, name in enumerate(names):
            expected = together([whole[0][place][0]])[4:]
            assert together([one[place] for one in answers]) == expected, (name, ranks)


@pytest.mark.nightly
def test_an_error_of_one_rank_is_told_by_all(
    run_ranks: RunRanks, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    (tmp_path / "a.jsonl").write_text("1\n" * 40 + '{"cut": "of')
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "a.txt").write_text("a line\n" * (rank + 1))
    first, second = run_ranks(streaming.fail, 2, str(tmp_path))
    for said in (first, second):
        damaged, others = said.split("\n--\n")
        assert f"{tmp_path}/a.jsonl: line 41 " in damaged
        assert "rank 1 " in others
        assert "rank 0 reads 1 files" in others
    assert first.startswith("rank 1 ")
    assert re.sub(r"digest \w+", "digest DIGEST", first) == snapshot
    assert re.sub(r"digest \w+", "digest DIGEST", second) == snapshot
