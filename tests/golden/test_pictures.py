"""The pictures in the documents are what the code draws today."""

import runpy
from pathlib import Path

IMAGES = Path(__file__).resolve().parent.parent.parent / "docs" / "images"


def test_the_picture_of_muster_gpus_is_current() -> None:
    drawn = runpy.run_path(str(IMAGES / "draw.py"))["draw"]()
    assert drawn == (IMAGES / "gpus.svg").read_text(), "run: python docs/images/draw.py"


def test_the_pictures_of_muster_top_are_current() -> None:
    drawn = runpy.run_path(str(IMAGES / "draw_top.py"))["draw_all"]()
    for name, picture in drawn.items():
        assert picture == (IMAGES / name).read_text(), "run: python docs/images/draw_top.py"
