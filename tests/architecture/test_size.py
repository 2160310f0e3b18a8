"""The code does not grow: each figure of scripts/size.py is at most its ceiling in ceilings.toml."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "size.py"


def test_no_figure_is_above_its_ceiling() -> None:
    specification = importlib.util.spec_from_file_location("size", SCRIPT)
    size = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(size)
    assert size.too_high(size.measure()) == []
