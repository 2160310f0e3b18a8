"""Which ends of ranks mean that they saved because they were asked to."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchmuster.launch import protocol
from torchmuster.launch.launcher.stopping import (
    Saved,
    StopCause,
    saved_after_request,
    saved_by_ranks,
)

SAVED = "saved at step 120 after a stop request"
WORDS = f"{SAVED} (SIGUSR1 to rank 1)"


def rank(number: int, exit_code: int, what: str = "") -> protocol.Failure:
    why = "SIGUSR1 to rank 1" if what else ""
    return protocol.Failure(
        rank=number, exit_code=exit_code, ago_s=0.0, what=what, why=why, error=""
    )


def machine(
    *failures: protocol.Failure,
    text: str = "",
    lost: str = "",
    told: bool = True,
    stop_signal: str = "",
) -> Any:
    ended = (
        protocol.Ended(attempt=0, good=False, failures=failures, text=text, stop_signal=stop_signal)
        if told
        else None
    )
    return SimpleNamespace(name="b", ended=ended, lost=lost)


@pytest.mark.parametrize(
    "machines",
    [
        [machine(rank(0, 75, WORDS))],
        [machine(rank(0, 75, WORDS)), machine(rank(1, 75, WORDS))],
        [machine(rank(0, 75, WORDS), rank(1, -15))],  # on its way out it was told once more
        [machine(rank(0, 143), rank(1, 75, WORDS))],
        [machine(rank(0, 75, WORDS), text="the ranks were stopped by SIGTERM")],
        [machine(rank(0, 75, WORDS), lost="its node agent was killed")],  # after it had told
    ],
)
def test_ranks_that_saved_say_so(machines: list[Any]) -> None:
    assert saved_by_ranks(machines) == Saved(text=WORDS)


def test_a_script_that_ends_with_the_code_needs_no_words() -> None:
    assert saved_by_ranks([machine(rank(0, 75))]) == Saved(text="saved after a stop request")


@pytest.mark.parametrize(
    "machines",
    [
        [],
        [machine(rank(0, 1))],
        [machine(rank(0, -15))],
        [machine(rank(0, 75, WORDS), rank(1, 1))],  # a rank failed of something else
        [machine(rank(0, 75, WORDS)), machine(rank(1, -11))],
        [machine(rank(0, 75, WORDS)), machine(rank(1, -15))],  # nobody there says that it saved
        [machine(rank(0, 75, WORDS)), machine(told=False, lost="the link is cut")],
    ],
)
def test_nothing_else_is_taken_for_it(machines: list[Any]) -> None:
    assert saved_by_ranks(machines) is None


def test_a_warning_ends_ranks_that_cannot_hear_it_yet_which_is_no_failure() -> None:
    starting = [machine(rank(0, -10)), machine(rank(1, 138), rank(2, -15))]
    stopped = saved_by_ranks(starting, warned=True)
    assert stopped is not None
    assert not stopped.is_new
    assert "nothing new to save" in stopped.text
    # Nobody warned them, or they do not know how to save.
    assert saved_by_ranks(starting) is None
    late = [machine(rank(0, -10), rank(1, 75, WORDS))]
    assert saved_by_ranks(late, warned=True) == Saved(text=WORDS)
    assert saved_by_ranks([machine(rank(0, -10), rank(1, 1))], warned=True) is None


def test_whoever_got_the_signal_is_named_and_not_the_rank_that_it_was_passed_on_to(
    tmp_path: Path,
) -> None:
    saved = [machine(rank(0, 75, WORDS)), machine(rank(1, 75, WORDS))]
    cause = StopCause(origin="SIGTERM to the launcher")
    by_us = saved_after_request(saved, cause, tmp_path)
    assert by_us == Saved(text=f"{SAVED} (SIGTERM to the launcher)")
    by_slurm = [machine(rank(0, 75, WORDS)), machine(rank(1, 75, WORDS), stop_signal="SIGTERM")]
    elsewhere = Saved(text=f"{SAVED} (SIGTERM to the node agent on b)")
    assert saved_after_request(by_slurm, None, tmp_path) == elsewhere
    assert saved_after_request(saved, None, tmp_path) == Saved(text=WORDS)
    silent = [machine(rank(0, 75))]
    by_code = saved_after_request(silent, cause, tmp_path)
    assert by_code is not None
    assert by_code.text.endswith(" (SIGTERM to the launcher)")
    assert saved_after_request([machine(rank(0, -15))], cause, tmp_path) is None


def test_a_checkpoint_of_a_script_counts_if_it_is_complete_and_younger_than_the_request(
    tmp_path: Path,
) -> None:
    ended, path = [machine(rank(0, -15))], tmp_path / "state.safetensors"
    path.write_bytes((2).to_bytes(8, "little") + b"{}")
    save = {"step": 3, "path": str(path), "library": "torch.save", "bytes": 10, "at_unix_s": 100.0}
    (tmp_path / "saves.jsonl").write_text(json.dumps(save) + "\n")
    assert saved_after_request(ended, StopCause(origin="Ctrl-C", at_unix_s=99.0), tmp_path)
    assert not saved_after_request(ended, StopCause(origin="Ctrl-C", at_unix_s=101.0), tmp_path)
    path.write_bytes(b"torn")
    assert not saved_after_request(ended, StopCause(origin="Ctrl-C", at_unix_s=99.0), tmp_path)
