"""How the launcher speaks: in order, to the terminal and the run's log, and never held up by either."""

import contextlib
import functools
import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import GIVE_UP_S
from torchmuster.finding import Finding, Status
from torchmuster.launch.launcher import console as voice_module
from torchmuster.launch.launcher.console import OutputBuffer, OutputDeduplicator, TerminalConsole
from torchmuster.runfolder import RunFolder, create_run_folder

FINDING = Finding(name="rank-failed", status=Status.FAILURE, what="rank 1 failed", why="no data")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run_folder(tmp_path / "runs", "train")


class Terminal:
    """Standard output and error as a pipe each, read or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends: dict[str, tuple[int, io.TextIOWrapper]] = {}
        self._monkeypatch = monkeypatch
        for name in ("stdout", "stderr"):
            reading, writing = os.pipe()
            self.ends[name] = (reading, os.fdopen(writing, "w", encoding="utf-8"))

    def console(
        self, run: RunFolder, *, colour: bool = False, own_colour: bool = False
    ) -> TerminalConsole:
        """Return a voice that speaks here."""
        for name, (_, stream) in self.ends.items():
            self._monkeypatch.setattr(sys, name, stream)
        return TerminalConsole(run, colour=colour, own_colour=own_colour)

    def read(self, name: str) -> str:
        """Return all that was shown; nothing can be shown after that."""
        reading, stream = self.ends.pop(name)
        stream.close()
        with os.fdopen(reading, encoding="utf-8") as shown:
            return shown.read()

    def go_away(self, name: str) -> None:
        """Stop reading for good."""
        reading, stream = self.ends[name]
        os.close(reading)
        self.ends[name] = (os.open(os.devnull, os.O_RDONLY), stream)

    def fill(self, name: str) -> None:
        """Be a terminal that was paused."""
        _, stream = self.ends[name]
        os.set_blocking(stream.fileno(), False)
        try:
            while True:
                os.write(stream.fileno(), b"x" * 65536)
        except BlockingIOError:
            os.set_blocking(stream.fileno(), True)

    def close(self) -> None:
        """Go on reading until nobody writes any more."""
        while any(thread.name == "console" for thread in threading.enumerate()):
            for reading, _ in self.ends.values():
                os.set_blocking(reading, False)
                with contextlib.suppress(BlockingIOError):
                    os.read(reading, 1 << 20)
            time.sleep(0.01)
        for name in list(self.ends):
            os.set_blocking(self.ends[name][0], True)
            self.read(name)


@pytest.fixture
def real_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    one = Terminal(monkeypatch)
    yield one
    monkeypatch.undo()
    one.close()


class PatientConsole(OutputBuffer):
    """A console whose thread is waited for, however late the machine lets it run."""

    def close(self, timeout_s: float = GIVE_UP_S) -> None:
        super().close(timeout_s)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said is said within a moment, and heard before the next word, on a busy machine too."""
    monkeypatch.setattr(voice_module, "_CATCH_UP_WITHIN_S", GIVE_UP_S)
    monkeypatch.setattr(voice_module, "OutputBuffer", PatientConsole)
    monkeypatch.setattr(
        voice_module,
        "OutputDeduplicator",
        functools.partial(OutputDeduplicator, window_s=GIVE_UP_S),
    )


@pytest.fixture
def terminal(real_terminal: Terminal, patient: None) -> Terminal:
    return real_terminal


def test_ranks_speak_on_standard_output_and_the_launcher_on_standard_error(
    run: RunFolder, terminal: Terminal
) -> None:
    console = terminal.console(run)
    with console.speaking():
        console.say("device: cpu\n1 thread per rank")
        console.world(2)
        console.output(0, "loss 1\nonly here\n")
        console.output(1, "loss 1\n")
        console.show([FINDING])
    own = "muster: device: cpu\nmuster: 1 thread per rank\n"
    ranks = "[all 2 ranks] loss 1\n[rank 0] only here\n"
    found = "failure  rank 1 failed\n         why  no data\n"
    assert terminal.read("stdout") == ranks
    assert terminal.read("stderr") == own + found
    assert run.console.read_text() == own + ranks + found


@pytest.mark.usefixtures("patient")
def test_what_a_rank_wrote_before_the_launcher_spoke_comes_before_it(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    both = tmp_path / "both"  # a terminal shows the two streams as one
    with both.open("a") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        console = TerminalConsole(run)
        with console.speaking():
            console.world(2)
            for number in range(20):
                console.output(number % 2, f"said {number}\n")
                console.say(f"spoken {number}")
        monkeypatch.undo()
    expected = [
        line
        for number in range(20)
        for line in (f"[rank {number % 2}] said {number}", f"muster: spoken {number}")
    ]
    assert both.read_text().splitlines() == expected
    assert run.console.read_text().splitlines() == expected


def test_a_new_attempt_shows_the_end_of_the_one_before_first(
    run: RunFolder, terminal: Terminal
) -> None:
    console = terminal.console(run)
    with console.speaking():
        console.world(1)
        console.output(0, "last words\n")
        console.world(2)
        console.output(1, "again\n")
    assert terminal.read("stdout") == "last words\n[rank 1] again\n"


def test_a_paused_terminal_does_not_hold_up_the_launcher(
    run: RunFolder, real_terminal: Terminal
) -> None:
    real_terminal.fill("stdout")
    real_terminal.fill("stderr")
    console = real_terminal.console(run)
    with console.speaking():
        console.world(2)
        console.output(0, "loss 1\n")
        console.say("rank 1 failed")
    log = run.console.read_text()
    assert log == "[rank 0] loss 1\nmuster: rank 1 failed\n"


def test_a_terminal_that_has_gone_does_not_end_the_run(run: RunFolder, terminal: Terminal) -> None:
    terminal.go_away("stdout")
    terminal.go_away("stderr")
    console = terminal.console(run)
    with console.speaking():
        console.world(2)
        for number in range(100):
            console.output(0, f"step {number}\n")
            if number % 25 == 0:
                console.say("still here")
        console.show([FINDING])
    log = run.console.read_text()
    assert log.count("muster: still here\n") == 4
    assert "[rank 0] step 99\n" in log
    assert log.endswith("why  no data\n")


def test_colours_are_for_terminals_and_never_for_the_log(
    run: RunFolder, terminal: Terminal
) -> None:
    console = terminal.console(run, colour=True, own_colour=False)
    with console.speaking():
        console.world(1)
        console.output(0, "\x1b[32mgreen\x1b[0m\n")
        console.show([FINDING])
    assert terminal.read("stdout") == "\x1b[32mgreen\x1b[0m\n"
    assert "\x1b" not in terminal.read("stderr")
    assert "\x1b" not in run.console.read_text()


def test_the_launcher_s_own_colour_is_standard_error_s(run: RunFolder, terminal: Terminal) -> None:
    console = terminal.console(run, own_colour=True)
    with console.speaking():
        console.show([FINDING])
    assert terminal.read("stderr").startswith("\x1b[31mfailure")
    assert "\x1b" not in run.console.read_text()


def test_an_error_message_cannot_steer_the_terminal(run: RunFolder, terminal: Terminal) -> None:
    console = terminal.console(run)
    with console.speaking():
        console.world(1)
        console.output(0, "\x1b]0;owned\x07plain\x1b[2J\n")
    assert terminal.read("stdout") == "plain\n"


@pytest.mark.usefixtures("patient")
def test_other_machines_words_cannot_steer_the_terminal(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(monkeypatch)
    console = terminal.console(run, own_colour=True)
    bad = "b: \x1b]52;c;cm0gLXJm\x07GPU \x1b[2J busy"
    with console.speaking():
        console.say(bad)
        console.show([Finding(name="x", status=Status.FAILURE, what=bad, why=bad, fix=bad)])
    shown = terminal.read("stderr")
    terminal.read("stdout")
    assert "GPU" in shown
    for text in (shown, run.console.read_text()):
        assert "\x1b]" not in text
        assert "\x1b[2J" not in text
        assert "\x07" not in text
