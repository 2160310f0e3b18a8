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
    set_state,
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
        "head": page_parts.head_part(picture),
        "tiles": page_parts.tiles_part(picture),
        "alerts": page_parts.alerts_part(picture.alerts),
        "curves": page_parts.curves_part(picture),
        "times": page_parts.times_part(picture.shares) + page_parts.remark_part(picture),
        "ranks": page_parts.rank_map(picture.ranks),
        "happened": page_parts.events_part(picture),
    }
    for part in parts.values():
        check_markup(part)
    return parts


def _tiles(parts: dict[str, str]) -> dict[str, str]:
    return dict(re.findall(r"<div><span>(.*?)</span><b>(.*?)</b></div>", parts["tiles"]))


def test_before_the_first_step(run: RunFolder) -> None:
    parts = _shown(run)
    assert 'llm: <b class="ok">running</b>' in parts["head"]
    assert "no step yet" in parts["tiles"]
    assert "no recent heartbeat" in parts["ranks"]
    assert parts["curves"] == parts["times"] == ""


def test_a_folder_in_which_nothing_is_yet(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    run.state.unlink()
    assert "submitted" in _shown(run)["head"]


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
    assert "compute 60%" in parts["times"]
    assert "communication 20%" in parts["times"]


@pytest.mark.parametrize("count", [1, 8, 64, 600])
def test_each_rank_has_a_place_with_its_figure(run: RunFolder, count: int) -> None:
    add_ranks(run, count, slow=0, step=120)
    shown = _shown(run)["ranks"]
    places = re.findall(r'--heat:([\d.]+)" title="rank (\d+) on a: waiting for other', shown)
    assert [int(rank) for _, rank in places] == list(range(min(count, 512)))
    assert places[0][0] == "0.00"
    assert {heat for heat, _ in places[1:]} <= {"0.40"}
    assert shown.count("<small>0</small>119</span>") == 1, "its step"
    assert ("the first 512 shown" in shown) == (count == 600)
    assert ("the other ranks wait for rank 0" in shown) == (count > 1)


def test_what_is_not_known_of_a_rank_is_a_question_mark(run: RunFolder) -> None:
    add_ranks(run, 2)
    (path,) = run.metrics.glob("ranks/*/from-0.json")
    path.write_text(path.read_text().replace('"data_share":0.1', '"data_share":null', 1))
    assert '<span class="unknown"' in _shown(run)["ranks"]


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


def test_phases_and_restarts_in_their_order(run: RunFolder) -> None:
    for name, at, facts in (
        ("joining", 90, {}),
        ("starting", 88, {}),
        ("started", 85, {"attempt": 0, "ranks": 2, "hosts": ["a 2"]}),
        ("running", 85, {}),
        ("restart", 40, {"headline": "rank 1 failed", "from_step": 50}),
        ("starting", 38, {}),
        ("running", 30, {}),
    ):
        add_event(run, name, NOW - at, **facts)
    shown = _shown(run)["happened"]
    assert re.findall(r"<li>(.*?)</li>", shown) == [
        "joining 2.00 s",
        "starting 3.00 s",
        "running 45.0 s",
        "restart",
        "starting 8.00 s",
        "running 30.0 s",
    ]
    assert "rank 1 failed" in shown
    assert "step 50" in shown
    assert "2 ranks started: a 2" in shown


def test_until_the_first_step_of_an_attempt_the_ranks_are_loading(run: RunFolder) -> None:
    for name, at in (("running", 80), ("restart", 40), ("running", 30)):
        add_event(run, name, NOW - at)
    times = ((1, 60), (2, 58), (3, 20))  # a line is written when its step is over
    lines = [{**LINE, "step": step, "step_s": 2.0, "at_unix_s": NOW - at} for step, at in times]
    write_lines(run, lines)
    assert re.findall(r"<li>(.*?)</li>", _shown(run)["happened"]) == [
        "loading 18.0 s",
        "running 22.0 s",
        "restart",
        "loading 8.00 s",
        "running 22.0 s",
    ]


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


def test_control_characters_of_a_run_steer_nothing(run: RunFolder) -> None:
    set_state(run, "failed", "rank 1: \x1b[2J\x00bad")
    assert "rank 1: \N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}bad" in _shown(run)["head"]


def test_a_constant_learning_rate_is_a_figure_and_no_curve(run: RunFolder) -> None:
    add_lines(run, learning_rate=3e-6)
    parts = _shown(run)
    assert _tiles(parts)["learning rate"] == "3e-06"
    assert ">learning rate<" not in parts["curves"]
    write_lines(run, lifelike_lines(20))
    assert ">learning rate<" in _shown(run)["curves"]


def test_that_a_run_has_finished_is_no_alert(run: RunFolder) -> None:
    set_state(run, "finished")
    assert "has finished" not in _shown(run)["alerts"]
    set_state(run, "failed")
    assert "has failed" in _shown(run)["alerts"]
    picture = RunWatch(run).look(NOW)
    assert [one.alert.name for one in picture.news] == ["MusterRunFailed"]


def test_a_share_is_at_most_100_percent(run: RunFolder) -> None:
    add_ranks(run, 2, spread=2.0)
    shown = _shown(run)["ranks"]
    assert max(int(value) for value in re.findall(r"</small>(\d+)</span>", shown)) == 100
