"""What is seen of a cell: folded lines, values once, where the ranks stand, failures before the others end."""

from pathlib import Path

from syrupy.assertion import SnapshotAssertion

from torchmuster.launch.heartbeat import Heartbeat, PendingCollective
from torchmuster.notebook.messages import Done
from torchmuster.notebook.shown import CellShown, Lines, errors_text, progress_text, values_text
from torchmuster.runfolder import RunFolder


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def heartbeat(rank: int, place: str, doing: str, *, waits: str = "") -> Heartbeat:
    called = (PendingCollective(group="", number=1, operation=waits),) if waits else ()
    return Heartbeat(
        rank=rank,
        pid=1,
        beat=1,
        moves=1,
        place=place,
        doing=doing,
        waiting=bool(waits),
        waits=called,
    )


def done(value: str = "", error: str = "") -> Done:
    return Done(request=0, value=value, error=error)


def test_lines_that_are_alike_are_one_and_what_has_no_end_waits(tmp_path: Path) -> None:
    wrote: list[str] = []
    clock = Clock()
    lines = Lines(RunFolder(tmp_path), 2, wrote.append, clock)
    lines.add(0, "hel")
    lines.add(1, "hello\n")
    lines.add(0, "lo\n10%\r20%")
    assert lines.unfinished(0) == "20%"
    lines.show_due()
    assert wrote == []
    clock.now = 1.0
    lines.show_due()
    assert wrote == ["[all 2 ranks] hello\n"]
    lines.show_all()
    assert wrote[1:] == ["[rank 0] 20%\n"]


def test_values_and_errors_that_are_alike_are_shown_once() -> None:
    assert values_text({0: done("1"), 1: done("1"), 2: done("2")}, 3) == "[ranks 0-1] 1\n[rank 2] 2"
    assert values_text({0: done("1"), 1: done("1")}, 2) == "[all 2 ranks] 1"
    assert values_text({0: done("a\nb"), 1: done()}, 2) == "[rank 0]\na\nb"
    assert values_text({0: done("1")}, 1) == "1"
    assert errors_text({0: done(error="E"), 1: done("1")}, 2) == "[rank 0] E"


def test_where_ranks_stand_is_said_of_those_alike_together(snapshot: SnapshotAssertion) -> None:
    places = {
        0: heartbeat(0, "cell-3:2", "all_reduce", waits="all_reduce"),
        1: heartbeat(1, "cell-3:2", "all_reduce", waits="all_reduce"),
        2: heartbeat(2, "cell-3:1", "time.sleep"),
        4: heartbeat(4, "", ""),
    }
    assert progress_text(range(5), (0, 1, 2, 4), places) == snapshot
    assert progress_text([0], [0], places, lambda _: "45%|####") == "rank 0: 45%|####"


class Seen(CellShown):
    def __init__(self, folder: Path) -> None:
        self.wrote: list[str] = []
        self.placed: list[str] = []
        self.clock = Clock()
        super().__init__(
            RunFolder(folder),
            2,
            range(2),
            self.wrote.append,
            self.placed.append,
            every_s=1.0,
            clock=self.clock,
        )


def test_a_short_cell_shows_no_progress(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    seen.clock.now = 2.9
    seen.passing({})
    seen.end()
    assert seen.placed == []


def test_a_longer_one_says_who_still_runs_and_at_last_how_long_it_took(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    seen = Seen(tmp_path)
    for now in (3.1, 3.2, 4.5):
        seen.clock.now = now
        seen.passing({1: done()})
    seen.clock.now = 6.0
    seen.end()
    assert [line.partition(": ")[0] for line in seen.placed] == ["3 s", "4 s", "took 6 s"]
    assert seen.placed == snapshot


def test_a_failure_is_shown_before_the_others_end(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    failed = {1: done(error="ValueError: x")}
    seen.passing(failed)
    seen.clock.now = 2.1
    seen.passing(failed)
    seen.passing(failed)
    assert seen.wrote == ["[rank 1] ValueError: x\n"]
    assert seen.errors(failed) == "rank 1 failed, as shown above"
    assert seen.errors({**failed, 0: done(error="E")}) == "[rank 0] E"
