"""Following a rank's log: whole lines, each once, whatever the moments at which one looks."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchmuster.launch.keeper import tails
from torchmuster.launch.keeper.tails import Tail


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.log"


def write(log: Path, text: str | bytes) -> None:
    with log.open("ab") as stream:
        stream.write(text if isinstance(text, bytes) else text.encode())


def test_a_log_that_is_not_there_yet_has_nothing_to_show(log: Path) -> None:
    tail = Tail(0, log)
    assert tail.read(0.0) == ""
    write(log, "first\n")
    assert tail.read(0.1) == "first\n"
    assert tail.read(0.2) == ""


def test_what_an_earlier_attempt_wrote_is_not_shown_again(log: Path) -> None:
    write(log, "before\n")
    tail = Tail(0, log)
    write(log, "after\n")
    assert tail.read(0.0) == "after\n"


def test_a_line_is_shown_when_it_is_whole_and_at_the_end_in_any_case(log: Path) -> None:
    tail = Tail(0, log)
    write(log, "one\ntw")
    assert tail.read(0.0) == "one\n"
    assert tail.read(9.0) == ""
    write(log, "o\nthree")
    assert tail.read(9.1) == "two\n"
    assert tail.read(9.2, last=True) == "three\n"
    assert tail.read(9.3, last=True) == ""


def test_a_letter_that_was_written_in_two_halves_is_whole(log: Path) -> None:
    tail = Tail(0, log)
    first, second = "é🚀\n".encode()[:3], "é🚀\n".encode()[3:]
    write(log, first)
    assert tail.read(0.0) == ""
    write(log, second)
    assert tail.read(0.1) == "é🚀\n"


def test_what_is_no_text_does_not_stop_it(log: Path) -> None:
    tail = Tail(0, log)
    write(log, b"\xff\xfe\x00\nnext\n")
    assert tail.read(0.0) == "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}\x00\nnext\n"


def test_a_progress_bar_is_shown_every_few_seconds_and_at_its_end(log: Path) -> None:
    tail = Tail(0, log)
    shown = []
    for step in range(100):
        write(log, f"\r{step}%")
        if text := tail.read(10 + step / 10):
            shown.append(text)
    write(log, "\r100%\n")
    end = tail.read(20.0)
    # Ten seconds of a bar: a handful of states, each a line of its own, in order.
    assert 3 <= len(shown) <= 6
    states = [int(text.strip().rstrip("%")) for text in shown]
    assert states == sorted(states)
    assert end.endswith("\r100%\n")


def test_a_flood_comes_in_pieces_and_whole(log: Path) -> None:
    tail = Tail(0, log)
    text = "".join(f"line {number}\n" for number in range(30_000))
    write(log, text)
    pieces = []
    while piece := tail.read(0.0):
        pieces.append(piece)
    assert len(pieces) > 1
    assert all(piece.endswith("\n") for piece in pieces)
    assert "".join(pieces) == text


def test_a_line_without_an_end_does_not_fill_the_memory(log: Path) -> None:
    tail = Tail(0, log)
    write(log, "x" * 1_000_000)
    shown = "".join(tail.read(0.0) for _ in range(40))
    assert len(shown) > 900_000
    assert len(tail._unfinished) <= tails._CHUNK


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    lines=st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8")), max_size=8),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
def test_nothing_is_lost_doubled_or_changed_however_it_was_written(
    log: Path, lines: list[str], cuts: list[int]
) -> None:
    log.unlink(missing_ok=True)
    data = "".join(f"{line}\n" for line in lines).encode()
    tail = Tail(0, log)
    shown, place = "", 0
    for cut in sorted(min(cut, len(data)) for cut in cuts):
        write(log, data[place:cut])
        place = cut
        shown += tail.read(0.0)
    write(log, data[place:])
    while text := tail.read(0.0, last=True):
        shown += text
    assert shown.encode() == data
