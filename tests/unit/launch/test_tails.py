from pathlib import Path

import pytest

from torchmuster.launch.node.attempt import Tail


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.log"


def add(log: Path, data: bytes) -> None:
    with log.open("ab") as stream:
        stream.write(data)


def test_only_whole_lines_are_shown(log: Path) -> None:
    tail = Tail(0, log)
    add(log, b"one\ntw")
    assert tail.read(0.0) == "one\n"
    assert tail.read(0.0) == ""
    add(log, b"o\nthree\n")
    assert tail.read(0.0) == "two\nthree\n"


def test_a_line_that_was_never_finished_is_shown_at_the_end(log: Path) -> None:
    tail = Tail(0, log)
    add(log, b"Segmentation fault")
    assert tail.read(0.0) == ""
    assert tail.read(0.0, last=True) == "Segmentation fault\n"
    assert tail.read(0.0, last=True) == ""


def test_a_log_that_is_not_there_yet_has_nothing_to_show(log: Path) -> None:
    tail = Tail(0, log)
    assert tail.read(0.0) == ""
    add(log, b"now\n")
    assert tail.read(0.0) == "now\n"


def test_what_an_earlier_attempt_wrote_is_not_shown_again(log: Path) -> None:
    add(log, b"first attempt\n")
    tail = Tail(0, log)
    add(log, b"second attempt\n")
    assert tail.read(0.0) == "second attempt\n"


def test_letters_that_are_not_utf_8_do_not_end_it(log: Path) -> None:
    tail = Tail(0, log)
    add(log, b"caf\xe9\n")
    assert tail.read(0.0) == "caf\N{REPLACEMENT CHARACTER}\n"


def test_a_letter_whose_bytes_come_one_by_one_is_whole(log: Path) -> None:
    tail = Tail(0, log)
    for byte in "é\n".encode():
        assert tail.read(0.0) == ""
        add(log, bytes([byte]))
    assert tail.read(0.0) == "é\n"


def test_a_progress_bar_is_shown_now_and_then(log: Path) -> None:
    tail = Tail(0, log)
    add(log, b"10%\r20%\r30%\r")
    assert tail.read(10.0) == "30%\n"
    add(log, b"40%\r")
    assert tail.read(11.0) == ""
    add(log, b"50%\r")
    assert tail.read(12.5) == "50%\n"
    add(log, b"100%\n")
    assert tail.read(12.6) == "100%\n"


def test_a_line_without_an_end_does_not_fill_the_memory(log: Path) -> None:
    tail = Tail(0, log)
    add(log, b"x" * 1_000_000)
    shown = "".join(tail.read(0.0) for _ in range(20)) + tail.read(0.0, last=True)
    assert shown.count("x") == 1_000_000


def test_a_log_that_cannot_be_read_is_not_an_error(log: Path) -> None:
    tail = Tail(0, log)
    log.mkdir()
    assert tail.read(0.0) == ""


def test_a_letter_of_a_line_that_is_cut_for_its_length_is_whole(log: Path) -> None:
    tail = Tail(0, log)
    add(log, b"x" + "é".encode() * 200_000)
    shown = "".join(tail.read(0.0) for _ in range(20)) + tail.read(0.0, last=True)
    assert shown.replace("\n", "") == "x" + "é" * 200_000


def test_it_knows_where_the_attempt_began(log: Path) -> None:
    assert Tail(0, log).began == 0
    add(log, b"first attempt\n")
    tail = Tail(0, log)
    add(log, b"second\n")
    tail.read(0.0)
    assert tail.began == len("first attempt\n")
