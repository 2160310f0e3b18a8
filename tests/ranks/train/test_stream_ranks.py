"""Streams on real ranks: every record once, and a resume on the same number of ranks."""

import json
from pathlib import Path

import pytest

from rank_group import RunRanks
from rank_programs import streaming

pytestmark = [pytest.mark.ranks, pytest.mark.integrations]


def test_two_ranks_read_a_stream_and_resume_it(run_ranks: RunRanks, tmp_path: Path) -> None:
    texts = [f"line {number} {'long ' * (number % 4)}" for number in range(120)]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    answers = run_ranks(streaming.read_and_resume, 2, str(tmp_path / "a.txt"), 9)
    first, second = answers
    assert len(first[0]) == len(second[0])
    assert first[2] == second[2]
    tokens = []
    for whole, rest, _ in answers:
        assert rest == whole[9:]
        for batch in whole:
            for row in batch:
                tokens += [token for token in row if token < 256]
    assert sorted(tokens) == sorted("".join(texts).encode())


def test_an_error_of_one_rank_raises_on_both(run_ranks: RunRanks, tmp_path: Path) -> None:
    records = [{"text": "a"}] * 41
    records[40] = {"text": ["not a text"]}  # type: ignore[dict-item]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    first, second = run_ranks(streaming.fail, 2, str(tmp_path / "a.jsonl"))
    assert first == second
    assert "rank 0 could not read its data" in first
