"""A profile on the screen and as a page: the verdict first, nothing from outside as markup."""

import dataclasses
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

from syrupy.assertion import SnapshotAssertion

from made_up_profiles import HEALTHY, ranks, step, trace
from torchmuster.profile.analysis import Profile
from torchmuster.profile.causes import find_causes, with_trials
from torchmuster.profile.facts import Change, Operation
from torchmuster.profile.report import page, screen, shares_chart

FOLDER = Path("profile/2026-01-31-120000")


def starved() -> Profile:
    """Return two ranks that wait for their data, with traces."""
    mm = Operation(name="aten::<b>mm</b>", calls=2.0, self_s=0.02)
    traced = trace(top=(mm,))
    slow = {"data_s": 0.040}
    facts = []
    for rank in ranks(slow, slow, trace=traced, notes=("FLOPs unknown",)):
        more = step(13, profiled=True, **slow)
        facts.append(dataclasses.replace(rank, steps=(*rank.steps, more)))
    return Profile(facts)


def test_the_screen_says_what_to_do_first_and_where_the_time_went(
    snapshot: SnapshotAssertion,
) -> None:
    profile = starved()
    causes = with_trials(find_causes(profile), {Change(kind="workers", value=2): 1.51})
    lines = screen(profile, causes, FOLDER).splitlines()
    assert any(line.split() == ["waiting", "for", "data", "38%", "38%"] for line in lines)
    assert any("2 loader workers gave 1.51x" in line for line in lines)
    assert str(FOLDER) in lines[-1]
    assert "warning" in lines[2]
    assert len(lines) <= 40
    assert "\n".join(lines) == snapshot


def test_a_healthy_training_is_told_what_limits_it() -> None:
    profile = Profile(ranks(HEALTHY, HEALTHY))
    assert "nothing to fix: 8" in screen(profile, (), FOLDER)
    assert "nothing to fix: 8" in page(profile, ())


def test_many_ranks_fit_on_the_screen() -> None:
    slow = {"forward_s": 0.06}
    profile = Profile(ranks(*([HEALTHY] * 40), slow, *([HEALTHY] * 23)))
    text = screen(profile, find_causes(profile), FOLDER)
    head = next(line for line in text.splitlines() if line.startswith("of a step"))
    assert "rank 40" in head  # the straggler is shown
    assert "58 more ranks" in text
    assert "rank 63" in page(profile, find_causes(profile))


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)
        self.seen.append(tag)


def test_the_page_has_its_chart_and_runs_nothing() -> None:
    profile = starved()
    text = page(profile, find_causes(profile))
    tags = _Tags()
    tags.feed(text)
    assert tags.seen.count("svg") == 1
    assert not {"script", "link", "img", "iframe"} & set(tags.seen)
    assert "aten::&lt;b&gt;mm&lt;/b&gt;" in text
    assert "<b>mm</b>" not in text
    ElementTree.fromstring(shares_chart(profile))
