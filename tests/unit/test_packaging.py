"""Recipes of other package managers name the same dependencies as pyproject.toml."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONDA_NAMES = {"torch": "pytorch", "msgspec": "msgspec-python"}


def test_the_conda_recipe_has_the_dependencies_and_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = (ROOT / "deploy/conda/meta.yaml").read_text()
    run = re.search(r"^  run:\n((?:    - .*\n)+)", recipe, re.MULTILINE)
    assert run is not None
    listed = {line.removeprefix("    - ").replace(" ", "") for line in run[1].splitlines()}
    wanted = {f"python{project['requires-python']}"}
    for one in project["dependencies"]:
        name, _, version = one.partition(">=")
        wanted.add(f"{CONDA_NAMES.get(name, name)}>={version}")
    assert listed == wanted
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/torchmuster/__init__.py").read_text())
    assert version is not None
    assert f'set version = "{version[1]}"' in recipe
