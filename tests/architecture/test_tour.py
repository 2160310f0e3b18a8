"""The tour for newcomers leads to functions and classes that exist."""

import re
from pathlib import Path

TOUR = Path(__file__).parents[2] / "docs" / "dev" / "tour.md"


def test_every_stop_of_the_tour_exists() -> None:
    stops = re.findall(r"\[`(\w+)`\]\((\S+\.py)#L\d+\)", TOUR.read_text())
    assert len(stops) > 40
    missing = []
    for name, file in stops:
        path = TOUR.parent / file
        if not path.exists() or not re.search(rf"(def|class) {name}\b", path.read_text()):
            missing.append((name, file))
    assert missing == []
