"""What is published agrees with pyproject.toml: the version, and the conda recipe."""

import re
import tomllib
from pathlib import Path

import pytest

import torchmuster

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPE = (ROOT / "deploy" / "conda" / "meta.yaml").read_text()
CONDA_NAMES = {"pytorch": "torch", "msgspec-python": "msgspec"}


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("deploy/conda/meta.yaml", r'set version = "(.+)"'),
        ("CITATION.cff", r"^version: (.+)$"),
        ("CHANGELOG.md", r"^## (\S+)"),
    ],
)
def test_version_is_the_same_everywhere(file: str, pattern: str) -> None:
    found = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] == torchmuster.__version__


def test_conda_recipe_has_the_dependencies_of_pyproject() -> None:
    listed = re.findall(r"^    - (\S+) (>=\S+)$", RECIPE.partition("  run:")[2], re.MULTILINE)
    needed = {CONDA_NAMES.get(name, name) + version for name, version in listed}
    assert needed == {*PROJECT["dependencies"], "python" + PROJECT["requires-python"]}


def test_conda_recipe_has_the_entry_point_of_pyproject() -> None:
    for name, target in PROJECT["scripts"].items():
        assert f"- {name} = {target}\n" in RECIPE
