"""The page about checks at scale shows what was simulated: its tables and picture come from the figures."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
IMAGES = DOCS / "images"
PAGE = DOCS / "measured" / "check-scale.md"


def test_the_tables_are_those_of_the_figures() -> None:
    page = PAGE.read_text(encoding="utf-8")
    made = runpy.run_path(str(IMAGES / "check_rounds_tables.py"))
    for name in made["TABLES"]:
        assert page.count(f"<!-- {name} -->\n") == page.count(f"<!-- end of {name} -->") == 1, name
    assert made["written"](page) == page, "run: python docs/images/check_rounds_tables.py"


def test_the_picture_is_that_of_the_figures() -> None:
    drawn = runpy.run_path(str(IMAGES / "draw_check_rounds.py"))["draw"]()
    picture = (IMAGES / "check_rounds.svg").read_text(encoding="utf-8")
    assert drawn == picture, "run: python docs/images/draw_check_rounds.py"


def test_a_line_is_fitted() -> None:
    fit = runpy.run_path(str(IMAGES / "check_rounds_tables.py"))["fit"]
    assert fit([(2, 5.0), (4, 7.0), (16, 11.0)]) == pytest.approx((3.0, 2.0))


def test_the_page_names_the_clock_that_was_simulated() -> None:
    from simulated_group import Clock

    clock, page = Clock(), PAGE.read_text(encoding="utf-8")
    words = page.partition("The seconds come from a model:")[2].partition("check_clock.py")[0]
    assert re.findall(r"([\d.]+ m?s) (?:to|for) ", words) == [
        f"{clock.telling_s * 1e3:g} ms",
        f"{clock.pair_s:g} s",
        f"{clock.call_s * 1e3:g} ms",
        f"{clock.deadline_s:g} s",
    ]
