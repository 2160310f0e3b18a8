"""SIGKILL at every moment of a save at which files differ."""

import itertools
import multiprocessing
import signal
from pathlib import Path

import pytest

from patience import GIVE_UP_S
from rank_group import RunRanks
from rank_programs.saving_killed import save_and_die
from torchmuster.checkpoints.store import open_store
from torchmuster.checkpoints.verify import UNFINISHED, newest_good

pytestmark = [pytest.mark.ranks, pytest.mark.nightly]


def test_a_kill_before_any_change_of_a_file_costs_no_commit(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    """The next process resumes from the newest commit; a killed save is unfinished, never damage."""
    store, resumed = open_store(tmp_path / "saves"), tmp_path / "resumed"
    context = multiprocessing.get_context("forkserver")
    committed = [0]
    for change in itertools.count():
        process = context.Process(
            target=save_and_die, args=(tmp_path / "saves", resumed, change), daemon=True
        )
        process.start()
        process.join(GIVE_UP_S)
        newest = newest_good(store)
        committed.append(newest.manifest.step if newest is not None else 0)
        if newest is not None:
            assert {finding.name for finding in newest.rejected} <= {UNFINISHED}
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert [int(step) for step in resumed.read_text().split()] == committed[:-1]
    # Kills before the first commit of a process, between its two, and after the second.
    gained = {after - before for before, after in itertools.pairwise(committed)}
    assert gained == {0, 1, 2}
    assert len(store.names()) == 1
