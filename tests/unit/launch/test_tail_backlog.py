from pathlib import Path

from torchmuster.launch.node.attempt import Tail


def test_of_a_backlog_the_end_can_be_had_without_the_rest(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    tail = Tail(0, log)
    lines = [f"line {number:06}\n" for number in range(20_000)]
    log.write_text("".join(lines))
    first = tail.read(0.0)
    skipped = tail.skip()
    rest = ""
    while text := tail.read(0.0, last=True):
        rest += text
    assert first.startswith("line 000000\n")
    assert rest.endswith("line 019999\n")
    assert len(first) + skipped + len(rest) == len("".join(lines))
    assert len(rest) <= 64 * 1024


def test_nothing_is_skipped_of_what_can_be_read_at_once(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    tail = Tail(0, log)
    log.write_text("one\ntwo")
    assert tail.read(0.0) == "one\n"
    assert tail.skip() == 0
    assert tail.read(0.0, last=True) == "two\n"


def test_what_comes_after_the_skipped_part_begins_with_a_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    tail = Tail(0, log)
    log.write_text("é" * 99 + "\n")
    tail.read(0.0)
    log.write_text(("é" * 99 + "\n") * 5000)
    assert tail.skip() > 0
    rest = ""
    while text := tail.read(0.0, last=True):
        rest += text
    assert set(rest.splitlines()) == {"é" * 99}
