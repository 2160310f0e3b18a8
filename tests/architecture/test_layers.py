"""The order of the house: imports go one way, torch stays in its rooms, the vocabulary is plain."""

import re
import sys
from pathlib import Path

import pytest

import torchmuster
from architecture.imports import (
    LEVELS,
    broken_rules,
    find_cycle,
    import_graph,
    imports_of,
)

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


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert find_cycle(import_graph(ROOT)) == []


def test_a_circle_is_found_also_through_functions_and_types(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from torchmuster import b\n")
    (tmp_path / "b.py").write_text("def f():\n    from torchmuster.c import g\n")
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torchmuster.a import h\n"
    (tmp_path / "c.py").write_text(types)
    names = ["torchmuster.a", "torchmuster.b", "torchmuster.c", "torchmuster.a"]
    assert find_cycle(import_graph(tmp_path)) == names


# Modules that are imported by their names: the folder, and the file that has the names.
LOADED_BY_NAME = {
    "cli": "cli/main.py",
    "cli/benches": "cli/bench.py",
    "diagnose/links": "diagnose/host_probe.py",
    "diagnose/machine": "diagnose/machine/all_checks.py",
    "known_errors": "known_errors/explain.py",
    "monitor/sinks": "monitor/sinks/sink.py",
    "bench/probes": "cli/benches/memory.py",
    "train/strategies": "train/strategies/choose.py",
    "integrations": "../../pyproject.toml",  # entry points
    "selftest": "selftest/assumptions.py",
    "selftest/probes": "selftest/checks/saving.py",
    "train": "__init__.py",  # the public names
    ".": "__init__.py",
}


def test_every_module_is_used() -> None:
    imported = set().union(*import_graph(ROOT).values())
    unused = []
    for path in ROOT.rglob("*.py"):
        folder = path.parent.relative_to(ROOT).as_posix()
        module = ".".join((ROOT.name, *path.relative_to(ROOT).with_suffix("").parts))
        is_program = '__name__ == "__main__"' in path.read_text(encoding="utf-8")
        if path.stem == "__init__" or "lessons" in path.parts or module in imported or is_program:
            continue
        names = LOADED_BY_NAME.get(folder)
        if names is None or path.stem not in (ROOT / names).read_text(encoding="utf-8"):
            unused.append(module)
    assert unused == []


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


# These print only what they made themselves: a join code, manifests, the id of a new run.
PRINT_THEMSELVES = {"output.py", "host.py"}


def test_commands_print_through_one_module_that_removes_control_characters() -> None:
    found = [
        f"{path.name}:{number}"
        for path in (ROOT / "cli").rglob("*.py")
        if path.name not in PRINT_THEMSELVES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"(?<![\w.])print\(|sys\.std(?:out|err)\.(?:buffer\.)?write", line)
    ]
    assert found == []
