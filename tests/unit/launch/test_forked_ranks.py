"""Signals to ranks that are gone, or were never there."""

import multiprocessing
import os
import signal

import pytest

from torchmuster.launch import forked_ranks


def test_a_signal_reaches_only_a_rank_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 0 would be the group of the sender."""
    killed: list[int] = []

    def kill(pid: int, number: int) -> None:
        killed.append(pid)
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)
    process = multiprocessing.Process()
    forked_ranks.send_signal(process, signal.SIGUSR1)
    assert killed == []
    process._popen = type("Ended", (), {"pid": 4711})()  # type: ignore[attr-defined]
    forked_ranks.send_signal(process, signal.SIGUSR1)
    assert killed == [4711]
    process._popen = None  # type: ignore[attr-defined]
