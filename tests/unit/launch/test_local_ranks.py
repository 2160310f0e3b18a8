"""Ranks of this machine for one measurement."""

import queue

import pytest

from patience import GIVE_UP_S
from torchmuster.launch import local_ranks


def test_long_work_reports_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "_SAY_EVERY_S", 0.001)
    texts: queue.SimpleQueue[str] = queue.SimpleQueue()
    with local_ranks._with_progress("measuring on 2 ranks", texts.put):
        assert texts.get(timeout=GIVE_UP_S) == "measuring on 2 ranks: 0 s so far"
