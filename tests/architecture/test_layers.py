"""The order of the house: imports go one way, torch stays in its rooms, the vocabulary is plain."""

import sys
from pathlib import Path

import pytest

import torchmuster
from architecture.imports import LEVELS, broken_rules, imports_of

ROOT = Path(torchmuster.__file__).parent


def test_every_import_goes_downwards_and_torch_stays_in_its_rooms() -> None:
    assert broken_rules(ROOT) == []


def test_the_vocabulary_needs_only_the_standard_library() -> None:
    vocabulary = [ROOT / f"{room}.py" for room, level in LEVELS.items() if level == 0]
    foreign = [
        f"{one.path.name}:{one.line}: {one.module}"
        for path in vocabulary
        for one in imports_of(path)
        if one.module.partition(".")[0] not in {*sys.stdlib_module_names, "torchmuster"}
    ]
    assert foreign == []


def test_no_room_has_a_name_that_says_nothing() -> None:
    vague = {"utils", "util", "common", "helpers", "misc", "core", "base"}
    assert [path for path in ROOT.rglob("*.py") if path.stem in vague] == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("devices/x.py", "import torchmuster.cli.main", "devices (level 1) imports cli (level 6)"),
        ("devices/x.py", "from torchmuster.config import fields", "imports config (level 1)"),
        ("config/x.py", "def f():\n    from torchmuster.train import loop", "imports train"),
        ("cli/x.py", "import torch", "torch must not be imported here"),
        ("cli/x.py", "def f():\n    import torch.distributed", "torch must not be imported here"),
        ("distributed.py", "from torch import nn", "torch must not be imported here"),
        ("devices/x.py", "from . import model", "relative import"),
        ("attic/x.py", "", "room 'attic' has no level"),
        ("__init__.py", "import os", "the package itself imports nothing"),
    ],
)
def test_each_rule_is_enforced(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(line + "\n")
    (broken,) = broken_rules(tmp_path)
    assert complaint in broken


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("cli/x.py", "from torchmuster.devices import model"),
        ("finding.py", "from torchmuster.errors import MusterError"),
        ("distributed.py", "def f():\n    import torch"),
        ("train/x.py", "import torch"),
        ("diagnose/probes/x.py", "import torch"),
        ("devices/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
    ],
)
def test_what_is_allowed_is_not_complained_about(tmp_path: Path, file: str, line: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + "\n")
    assert broken_rules(tmp_path) == []
