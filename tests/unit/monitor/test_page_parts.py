"""A run's page: the same figures as everywhere, whatever the run is like, and its texts are never markup."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from made_up_runs import (
    LINE,
    NOW,
    a_run,
    add_event,
    add_lines,
    add_ranks,
    lifelike_lines,
    write_lines,
)
from torchmuster.monitor.views import page_parts
from torchmuster.monitor.views.run_picture import RunWatch
from torchmuster.runfolder import RunFolder

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
_VOID = {"meta", "br", "img", "path", "rect", "line", "polyline", "circle", "input", "link"}


class Markup(HTMLParser):
    """Notes every element, what it has, and whether all are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open[-1] != tag and self.open[-1] in _VOID:
            self.open.pop()
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def check_markup(text: str) -> Markup:
    """Everything is closed, nothing runs, nothing is fetched."""
    markup = Markup(text)
    assert not [one for one in markup.open if one not in _VOID]
    assert not {"script", "img", "iframe", "object", "link"} & set(markup.names)
    assert not [name for name, _ in markup.attributes if name.startswith("on")]
    assert not [name for name, _ in markup.attributes if name in ("src", "href")]
    return markup


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return a_run(tmp_path)


def _shown(run: RunFolder) -> dict[str, str]:
    picture = RunWatch(run).look(NOW)
    parts = {
        "tiles": page_parts.tiles_part(picture),
        "alerts": page_parts.alerts_part(picture.alerts),
        "curves": page_parts.curves_part(picture),
        "ranks": page_parts.ranks_part(picture.ranks),
        "happened": page_parts.events_part(picture),
    }
    for part in parts.values():
        check_markup(part)
    return parts


def _tiles(parts: dict[str, str]) -> dict[str, str]:
    return dict(re.findall(r"<div><span>(.*?)</span><b>(.*?)</b></div>", parts["tiles"]))


def test_the_figures_are_the_runs_own(run: RunFolder) -> None:
    add_lines(run)
    (run.metrics / "evaluations.jsonl").write_text('{"step": 90, "epoch": 0, "accuracy": 0.875}\n')
    parts = _shown(run)
    tiles = _tiles(parts)
    assert tiles["step"] == "100"
    assert tiles["loss"] == "1.0000"
    assert tiles["samples/s"] == "610.0"
    assert tiles["ms/step"] == "2,000.0"
    assert tiles["evaluation: accuracy"] == "0.875"
    assert parts["curves"].count("<svg") == 3, "loss, samples/s, step time"


@pytest.mark.parametrize("count", [1, 8, 100])
def test_each_rank_has_a_row_with_its_figures(run: RunFolder, count: int) -> None:
    add_ranks(run, count, slow=0, step=120)
    shown = _shown(run)["ranks"]
    rows = re.findall(r"<tr><td>(\d+)</td><td>a</td><td>(\d+)</td><td>(\d+) %</td>", shown)
    assert [int(rank) for rank, _, _ in rows] == list(range(min(count, 64)))
    assert rows[0] == ("0", "119", "0")
    assert {waits for _, _, waits in rows[1:]} <= {"40"}
    assert ("and 36 more ranks" in shown) == (count == 100)
    assert ("the other ranks wait for rank 0" in shown) == (count > 1)


def test_losses_that_are_no_numbers_leave_a_gap_and_a_mark(run: RunFolder) -> None:
    write_lines(run, lifelike_lines(60, bad_from=50))
    parts = _shown(run)
    assert _tiles(parts)["loss"] == "NaN"
    loss = parts["curves"].partition("learning rate")[0]
    assert "nan" not in loss
    assert loss.count("NaN at") == 11
    assert "the loss is NaN" in parts["alerts"]
    write_lines(run, [LINE | {"loss": None}])
    assert 'aria-label="loss"' not in _shown(run)["curves"], "there is nothing to draw"


def test_a_long_run_has_no_more_points_than_a_page_can_show(run: RunFolder) -> None:
    write_lines(run, lifelike_lines(5000))
    parts = _shown(run)
    for line in re.findall(r'<polyline points="([^"]*)"', parts["curves"]):
        assert len(line.split()) <= 500
    assert sum(map(len, parts.values())) < 100_000


def test_texts_of_a_run_are_never_markup(tmp_path: Path) -> None:
    run = a_run(tmp_path, EVIL, "failed", EVIL)
    add_lines(run, verdict=EVIL)
    add_ranks(run, 2, host=EVIL)
    add_event(run, "restart", NOW - 50, headline=EVIL)
    add_event(run, EVIL, NOW - 40, what=EVIL)
    (run.metrics / "evaluations.jsonl").write_text(
        '{"step": 1, "' + EVIL.replace('"', "'") + '": 1.5}\n'
    )
    shown = "".join(_shown(run).values())  # looked at for elements and handlers, too
    assert "<script>" not in shown
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown
