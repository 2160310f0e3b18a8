"""What people see of all ranks' output: who said it, once, in order, and never dangerous."""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from torchmuster.launch.launcher.console import (
    WINDOW_S,
    OutputBuffer,
    OutputDeduplicator,
    printable,
    rank_list,
)

LOGS = "runs/x/logs"


def shown(world_size: int, *said: tuple[int, str], colour: bool = False) -> list[str]:
    """What is shown when all of this is said within a moment."""
    folder = OutputDeduplicator(world_size, logs=LOGS, colour=colour)
    for rank, text in said:
        folder.add(rank, text, 5.0)
    assert folder.due(5.0 + WINDOW_S / 2) == []
    return folder.due(5.0 + WINDOW_S)


def test_each_line_says_which_rank_it_is_of() -> None:
    assert shown(4, (3, "one\n\ntwo\n"), (1, "three\n")) == [
        "[rank 3] one",
        "[rank 3]",
        "[rank 3] two",
        "[rank 1] three",
    ]


def test_a_single_rank_needs_no_prefix_but_its_repeats_are_counted() -> None:
    assert shown(1, (0, "a\nb\nb\nb\n\nc\n")) == ["a", "b (3 times)", "", "c"]


def test_what_several_ranks_say_is_shown_once() -> None:
    warning = "UserWarning: slow\n"
    assert shown(9, *[(rank, warning) for rank in range(8)]) == ["[ranks 0-7] UserWarning: slow"]
    assert shown(5, (3, warning), (0, warning), (2, warning)) == ["[ranks 0,2-3] UserWarning: slow"]
    assert shown(2, (1, warning), (0, warning)) == ["[all 2 ranks] UserWarning: slow"]


def test_repeats_are_counted_for_those_who_repeat_equally() -> None:
    said = [(rank, "late\n" * (57 if rank < 2 else 1)) for rank in range(3)]
    assert shown(4, *said) == ["[ranks 0-1] late (57 times)", "[rank 2] late"]
    assert shown(2, (0, "late\n" * 2000), (1, "late\n" * 2000)) == [
        "[all 2 ranks] late (2,000 times)"
    ]


def test_lines_that_return_are_folded_across_ranks_without_changing_anybody_s_order() -> None:
    assert shown(2, (0, "a\nb\na\n"), (1, "a\nb\na\n")) == [
        "[all 2 ranks] a",
        "[all 2 ranks] b",
        "[all 2 ranks] a",
    ]
    # Rank 1 says b before a, so its a cannot be the one before rank 0's b.
    assert shown(2, (0, "a\nb\n"), (1, "b\na\n")) == ["[rank 0] a", "[all 2 ranks] b", "[rank 1] a"]


def test_lines_further_apart_than_the_window_are_not_folded() -> None:
    folder = OutputDeduplicator(2, logs=LOGS)
    folder.add(0, "a\n", 1.0)
    assert folder.next_due_s(1.1) == pytest.approx(WINDOW_S - 0.1)
    assert folder.due(1.0 + WINDOW_S) == ["[rank 0] a"]
    assert folder.next_due_s(1.3) is None
    folder.add(1, "a\n", 1.3)
    folder.add(0, "a\n", 1.3)
    assert folder.flush() == ["[all 2 ranks] a"]


def test_a_line_that_already_names_its_rank_is_left_as_it_is() -> None:
    assert shown(2, (0, "[rank 0] gathered=1\n[rank0]: Traceback\n"), (1, "[rank 0] no\n")) == [
        "[rank 0] gathered=1",
        "[rank0]: Traceback",
        "[rank 1] [rank 0] no",
    ]


def test_what_ranks_say_of_themselves_by_number_is_never_folded() -> None:
    assert shown(2, (0, "[rank 0] ok\n"), (1, "[rank 1] ok\n")) == ["[rank 0] ok", "[rank 1] ok"]
    # The same words, but rank 1 speaks of another than itself.
    assert shown(2, (0, "[rank 0] ok\n"), (1, "[rank 0] ok\n")) == [
        "[rank 0] ok",
        "[rank 1] [rank 0] ok",
    ]


def test_a_progress_bar_shows_its_last_state() -> None:
    said = "\r 10%|#   |\r 50%|##  |\r100%|####|\nnext\r\n"
    assert shown(2, (0, said)) == ["[rank 0] 100%|####|", "[rank 0] next"]


def test_our_own_lines_come_after_what_was_said_before_them() -> None:
    folder = OutputDeduplicator(2, logs=LOGS)
    folder.add(0, "a\n", 1.0)
    folder.note("joining", 1.1)
    folder.add(0, "b\n", 1.2)
    assert folder.due(1.0 + WINDOW_S) == ["[rank 0] a", "joining"]
    assert folder.flush() == ["[rank 0] b"]


def test_a_flood_is_cut_and_counted_every_second(snapshot: SnapshotAssertion) -> None:
    folder = OutputDeduplicator(4, logs=LOGS, lines_per_s=1000)
    folder.add(3, "".join(f"line {n}\n" for n in range(13_345)), 10.0)
    lines = folder.due(10.0 + WINDOW_S)
    assert lines[0] == "[rank 3] line 0"
    assert lines[-1] == "[rank 3] line 999"
    assert len(lines) == 1000
    assert folder.next_due_s(10.5) == pytest.approx(0.5)
    assert folder.due(10.9) == []
    (left_out,) = folder.due(11.0)
    assert "12,345 more lines" in left_out
    assert left_out.endswith(" runs/x/logs/rank-3.log")
    assert left_out == snapshot
    assert folder.next_due_s(11.0) is None
    folder.add(3, "calm again\n", 12.0)
    assert folder.flush() == ["[rank 3] calm again"]


def test_a_flood_of_several_ranks_is_told_once(snapshot: SnapshotAssertion) -> None:
    folder = OutputDeduplicator(4, logs=LOGS, lines_per_s=100)
    for rank in (0, 1):
        folder.add(rank, "".join(f"{rank}: {n}\n" for n in range(1000)), 10.0)
    # Each rank may always show a little.
    *_, shown, left_out = folder.flush()
    assert shown == "[rank 1] 1: 49"
    assert left_out == snapshot
    assert "1,850 more lines" in left_out


def test_one_rank_s_flood_does_not_hide_another_s_error() -> None:
    folder = OutputDeduplicator(4, logs=LOGS)
    folder.add(3, "".join(f"line {n}\n" for n in range(5000)), 10.0)
    folder.add(1, "Traceback (most recent call last):\nValueError: no\n", 10.1)
    assert "[rank 1] ValueError: no" in folder.flush()


def test_a_line_before_and_after_what_was_left_out_is_no_repeat(
    snapshot: SnapshotAssertion,
) -> None:
    folder = OutputDeduplicator(2, logs=LOGS, lines_per_s=60)
    folder.add(0, "".join(f"{n}\n" for n in range(59)) + "last\nmore\nlast\n", 10.0)
    *_, last, left_out = folder.flush()
    assert last == "[rank 0] last"
    assert "2 more lines" in left_out
    assert left_out.endswith(" runs/x/logs/rank-0.log")
    assert left_out == snapshot


def test_a_repeated_line_is_no_flood() -> None:
    assert shown(8, *[(rank, "x\n" * 10_000) for rank in range(8)]) == [
        "[all 8 ranks] x (10,000 times)"
    ]


def test_a_terminal_that_takes_nothing_does_not_fill_the_memory() -> None:
    folder = OutputDeduplicator(2, logs=LOGS)
    for second in range(100):
        folder.add(0, "".join(f"{second} {n}\n" for n in range(2000)), float(second))
    lines = folder.flush()
    assert len(lines) < 25_000
    told = sum(int(re.sub(r"\D", "", line.partition(" lines")[0])) for line in lines if "…" in line)
    assert told + sum("…" not in line for line in lines) == 100 * 2000


def test_a_very_long_line_is_cut_and_says_so(snapshot: SnapshotAssertion) -> None:
    (line,) = shown(2, (1, "x" * 50_000 + "\n"))
    assert line.startswith("[rank 1] xxx")
    told = line.removeprefix("[rank 1] ").lstrip("x")
    assert "40,000 more characters" in told
    assert told.endswith(" runs/x/logs/rank-1.log")
    assert told == snapshot


def test_colours_pass_on_a_terminal_only_and_end_with_their_line() -> None:
    assert shown(1, (0, "\x1b[1;31mred\n"), colour=True) == ["\x1b[1;31mred\x1b[0m"]
    assert shown(1, (0, "\x1b[31mred\x1b[0m\n"), colour=True) == ["\x1b[31mred\x1b[0m"]
    assert shown(1, (0, "\x1b[1;31mred\n")) == ["red"]


@pytest.mark.parametrize(
    ("raw", "safe"),
    [
        ("\x1b[2J\x1b[Hgone", "gone"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]52;c;bWFsaWNl\x1b\\text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b\x1b[K[2J", "\N{REPLACEMENT CHARACTER}[2J"),
        ("a\x08b\x9b2J\u202ec", "a�b�2J�c"),
        ("tab\tstays, 🏖️ and \xa0 too", "tab\tstays, 🏖️ and \xa0 too"),
    ],
)
def test_what_steers_a_terminal_is_made_harmless(raw: str, safe: str) -> None:
    assert printable(raw, colour=True) == safe


@pytest.mark.parametrize("begun", ["\x1b]", "\x1b]x", "\x1bP\x1b", "\x1b[0", "\x1b[ ", "\x1b "])
def test_sequences_that_never_end_take_no_time(begun: str) -> None:
    """If the time grew with the square of the length, this would take hours."""
    for line in (begun * 50_000, begun + "0" * 200_000, begun + " " * 200_000):
        printable(line, colour=True)


@given(st.text(alphabet=st.sampled_from("\x1b[]m;0123KJ\x07\\\r\x9b\x00 aé\u202e\ud800P^")))
def test_nothing_dangerous_gets_through(text: str) -> None:
    for colour in (True, False):
        line = printable(text, colour=colour)
        line.encode()
        if colour:
            line = re.sub(r"\x1b\[[0-9;:]*m", "", line)
        assert not re.search("[\x00-\x08\x0a-\x1f\x7f-\x9f\u202e]", line)


def test_rank_lists_are_short() -> None:
    assert rank_list([5, 3, 4, 0]) == "0,3-5"
    assert rank_list(range(0, 1000, 2)).endswith("20,22,… (500 in total)")


def expanded(lines: list[str], world_size: int) -> dict[int, list[str]]:
    """Undo the folding: what each rank said."""
    said: dict[int, list[str]] = {rank: [] for rank in range(world_size)}
    for line in lines:
        found = re.fullmatch(
            r"\[(?:all \d+ ranks|ranks? ([\d,-]+))\] (.*?)(?: \((\d+) times\))?", line
        )
        assert found, line
        for part in (found[1] or f"0-{world_size - 1}").split(","):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                said[rank] += [found[2]] * int(found[3] or 1)
    return said


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.lists(st.sampled_from("abc"), min_size=1), st.floats(0, 0.2)
        )
    )
)
def test_no_line_is_lost_delayed_or_out_of_order(says: list[tuple[int, list[str], float]]) -> None:
    folder = OutputDeduplicator(3, logs=LOGS)
    now_s, lines = 0.0, list[str]()
    expected: dict[int, list[str]] = {0: [], 1: [], 2: []}
    waits_since: dict[int, float] = {}
    for rank, words, pause_s in says:
        now_s += pause_s
        lines += folder.due(now_s)
        done = expanded(lines, 3)
        for one, since_s in list(waits_since.items()):
            if since_s + WINDOW_S <= now_s:
                assert done[one] == expected[one]
                del waits_since[one]
        folder.add(rank, "\n".join([*words, ""]), now_s)
        expected[rank] += words
        waits_since[rank] = now_s
    assert expanded(lines + folder.flush(), 3) == expected


@contextmanager
def pipe() -> Iterator[tuple[int, TextIO]]:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        try:
            yield reader, stream
        finally:
            os.close(reader)


def test_the_console_writes_within_the_window_and_the_rest_at_its_end() -> None:
    now_s = 100.0  # until the test says otherwise: all is said within a moment
    with pipe() as (reader, stream):
        with OutputBuffer(OutputDeduplicator(2, logs=LOGS), stream, clock=lambda: now_s) as console:
            console.output(0, "a\n")
            console.output(1, "a\n")
            now_s += WINDOW_S
            assert os.read(reader, 100) == b"[all 2 ranks] a\n"
            console.output(1, "é\n")
            console.say("the run finished")
        assert os.read(reader, 100).decode() == "[rank 1] é\nthe run finished\n"


def test_a_paused_terminal_does_not_hold_up_the_launcher() -> None:
    with pipe() as (reader, stream):
        console = OutputBuffer(OutputDeduplicator(1, logs=LOGS), stream)
        with console:
            for number in range(1000):
                console.output(0, f"{number} {'x' * 2000}\n")
            console.close(timeout_s=0.5)
            assert any(thread.name == "console" for thread in threading.enumerate())
            read = b""
            while not read.endswith(b"\n") or b"999 x" not in read:
                read += os.read(reader, 2**20)
        assert read.count(b"\n") == 1000


def test_when_nobody_reads_any_more_the_run_goes_on() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with (
        os.fdopen(writer, "w") as stream,
        OutputBuffer(OutputDeduplicator(1, logs=LOGS), stream) as console,
    ):
        console.output(0, "a\n")
        console.close()
        console.output(0, "b\n")
