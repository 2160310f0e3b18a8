"""What people see of all ranks' output: who wrote it, once, in order, and never dangerous."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patience import GIVE_UP_S
from torchmuster.finding import Finding, Status
from torchmuster.launch.launcher import console as console_module
from torchmuster.launch.launcher.console import LineMerger, TerminalConsole
from torchmuster.redaction import printable_line
from torchmuster.runfolder import RunFolder, create_run_folder

LOGS = "runs/x/logs"
FINDING = Finding(name="rank-failed", status=Status.FAILURE, what="rank 1 failed", why="no data")


def shown(world_size: int, *written: tuple[int, str], colour: bool = False) -> list[str]:
    """What is shown of all that is written within a moment."""
    merger = LineMerger(world_size, logs=LOGS, colour=colour)
    for rank, text in written:
        merger.add(rank, text)
    return merger.take()


@pytest.mark.parametrize(
    ("world_size", "written", "lines"),
    [
        pytest.param(
            4,
            [(3, "one\n\ntwo\n"), (1, "three\n")],
            ["[rank 3] one", "[rank 3]", "[rank 3] two", "[rank 1] three"],
            id="each line begins with its rank",
        ),
        pytest.param(
            1,
            [(0, "a\nb\nb\nb\n\nc\n")],
            ["a", "b (3 times)", "", "c"],
            id="a single rank needs no prefix",
        ),
        pytest.param(
            5,
            [(3, "slow\n"), (0, "slow\n"), (2, "slow\n")],
            ["[ranks 0,2-3] slow"],
            id="equal lines are shown once",
        ),
        pytest.param(
            3,
            [(0, "late\n" * 2000), (1, "late\n" * 2000), (2, "late\n")],
            ["[ranks 0-1] late (2,000 times)", "[rank 2] late"],
            id="repetitions are counted",
        ),
        pytest.param(
            2,
            [(0, "a\nb\na\n"), (1, "a\nb\na\n")],
            ["[all 2 ranks] a", "[all 2 ranks] b", "[all 2 ranks] a"],
            id="a line that returns is another line",
        ),
        pytest.param(
            2,
            [(0, "a\nb\n"), (1, "b\na\n")],
            ["[rank 0] a", "[all 2 ranks] b", "[rank 1] a"],
            id="the order of each rank stays",
        ),
        pytest.param(
            2,
            [(0, "[rank 0] ok\n[rank0]: Traceback\n"), (1, "[rank 0] ok\n[rank 1] ok\n")],
            ["[rank 0] ok", "[rank0]: Traceback", "[rank 1] [rank 0] ok", "[rank 1] ok"],
            id="a line that names its rank stays as it is",
        ),
        pytest.param(
            2,
            [(0, "\r 10%|#   |\r100%|####|\nnext\r\n")],
            ["[rank 0] 100%|####|", "[rank 0] next"],
            id="the last state of a progress bar",
        ),
    ],
)
def test_equal_lines_of_several_ranks_are_shown_once(
    world_size: int, written: list[tuple[int, str]], lines: list[str]
) -> None:
    assert shown(world_size, *written) == lines


def numbered(lines: int) -> str:
    return "".join(f"line {number}\n" for number in range(lines))


def test_a_flood_is_cut_and_counted() -> None:
    merger = LineMerger(4, logs=LOGS)
    merger.add(3, numbered(13_345))
    *lines, omitted = merger.take()
    assert (len(lines), lines[-1]) == (1000, "[rank 3] line 999")
    assert omitted == "… 12,345 more lines of rank 3: see runs/x/logs"
    merger.add(3, "calm again\n")
    assert merger.take() == ["[rank 3] calm again"]


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
    assert printable_line(raw, colour=True) == safe


@pytest.mark.parametrize("begun", ["\x1b]", "\x1b]x", "\x1bP\x1b", "\x1b[0", "\x1b[ ", "\x1b "])
def test_sequences_that_never_end_take_no_time(begun: str) -> None:
    """If the time grew with the square of the length, this would take hours."""
    for line in (begun * 50_000, begun + "0" * 200_000, begun + " " * 200_000):
        printable_line(line, colour=True)


@given(st.text(alphabet=st.sampled_from("\x1b[]m;0123KJ\x07\\\r\x9b\x00 aé\u202e\ud800P^")))
def test_nothing_dangerous_gets_through(text: str) -> None:
    for colour in (True, False):
        line = printable_line(text, colour=colour)
        line.encode()
        if colour:
            line = re.sub(r"\x1b\[[0-9;:]*m", "", line)
        assert not re.search("[\x00-\x08\x0a-\x1f\x7f-\x9f\u202e]", line)


def by_rank(lines: list[str], world_size: int) -> dict[int, list[str]]:
    """Undo the merging: what each rank wrote."""
    written: dict[int, list[str]] = {rank: [] for rank in range(world_size)}
    for line in lines:
        match = re.fullmatch(
            r"\[(?:all \d+ ranks|ranks? ([\d,-]+))\] (.*?)(?: \((\d+) times\))?", line
        )
        assert match, line
        for part in (match[1] or f"0-{world_size - 1}").split(","):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                written[rank] += [match[2]] * int(match[3] or 1)
    return written


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.sampled_from("abc"), min_size=1))),
    st.integers(1, 5),
)
def test_no_line_is_lost_or_out_of_order(
    written: list[tuple[int, list[str]]], taken_every: int
) -> None:
    merger = LineMerger(3, logs=LOGS)
    lines: list[str] = []
    expected: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for number, (rank, texts) in enumerate(written):
        merger.add(rank, "\n".join([*texts, ""]))
        expected[rank] += texts
        if number % taken_every == 0:
            lines += merger.take()
    assert by_rank(lines + merger.take(), 3) == expected


# ---- on a terminal


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run_folder(tmp_path / "runs", "train")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is written within a moment, and waited for, however late the machine lets threads run."""
    monkeypatch.setattr(console_module, "WINDOW_S", GIVE_UP_S)
    monkeypatch.setattr(console_module, "_CLOSE_WITHIN_S", GIVE_UP_S)


@pytest.mark.usefixtures("patient")
def test_ranks_write_to_standard_output_and_the_launcher_to_standard_error(
    run: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    with TerminalConsole(run) as console:
        console.say("device: cpu\n1 thread per rank")
        console.world(2)
        console.output(0, "loss 1\nonly here\n")
        console.output(1, "loss 1\n")
        console.show([FINDING])
    own = "muster: device: cpu\nmuster: 1 thread per rank\n"
    ranks = "[all 2 ranks] loss 1\n[rank 0] only here\n"
    finding = "failure  rank 1 failed\n         why  no data\n"
    assert capfd.readouterr() == (ranks, own + finding)
    assert run.console.read_text() == own + ranks + finding


@pytest.mark.usefixtures("patient")
def test_lines_of_ranks_and_of_the_launcher_stay_in_order(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    both = tmp_path / "both"  # a terminal shows the two streams as one
    with both.open("a") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        with TerminalConsole(run) as console:
            for number in range(20):
                console.world(2 + number)  # a new attempt
                console.output(number % 2, f"output {number}\n")
                console.say(f"message {number}")
    expected = []
    for number in range(20):
        expected += [f"[rank {number % 2}] output {number}", f"muster: message {number}"]
    assert both.read_text().splitlines() == expected
    assert run.console.read_text().splitlines() == expected


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A terminal that accepts no more output."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 65536)
    os.set_blocking(writing, True)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        yield
        monkeypatch.undo()
        os.close(reading)  # which ends the thread


@pytest.mark.usefixtures("paused")
def test_a_paused_terminal_does_not_hold_up_the_launcher(run: RunFolder) -> None:
    with TerminalConsole(run) as console:
        console.world(2)
        for _ in range(100):
            console.output(0, f"loss {'x' * 2000}\n")
            console.say("rank 1 failed")
    assert run.console.read_text().count("muster: rank 1 failed\n") == 100


@pytest.mark.usefixtures("patient")
def test_a_terminal_that_has_gone_does_not_end_the_run(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        with TerminalConsole(run) as console:
            for number in range(100):
                console.output(0, f"step {number}\n")
            console.show([FINDING])
    log = run.console.read_text()
    assert "step 99\n" in log
    assert log.endswith("why  no data\n")


@pytest.mark.usefixtures("patient")
def test_colours_are_for_terminals_and_never_for_the_log(
    run: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    with TerminalConsole(run, colour=True, own_colour=True) as console:
        console.output(0, "\x1b[32mgreen\x1b[0m\n")
        console.show([FINDING])
    ranks, own = capfd.readouterr()
    assert ranks == "\x1b[32mgreen\x1b[0m\n"
    assert own.startswith("\x1b[31mfailure")
    assert "\x1b" not in run.console.read_text()


@pytest.mark.usefixtures("patient")
def test_text_of_other_hosts_cannot_steer_the_terminal(
    run: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = "b: \x1b]52;c;cm0gLXJm\x07GPU \x1b[2J busy"
    with TerminalConsole(run, own_colour=True) as console:
        console.output(0, f"{bad}\n")
        console.say(bad)
        console.show([Finding(name="x", status=Status.FAILURE, what=bad, why=bad, fix=bad)])
    ranks, own = capfd.readouterr()
    for text in (ranks, own, run.console.read_text()):
        assert "GPU" in text
        assert not re.search("\x1b(?!\\[[0-9;]*m)|\x07", text)
