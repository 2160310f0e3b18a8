"""The packages that Python would find, read from their metadata without importing them."""

import importlib.util
import re
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.version import InvalidVersion, Version

from torchmuster.diagnose.check import Surroundings

# The label is free text: NVIDIA's containers have 2.6.0a0+ecf3bae40a.nv25.01.
_HARDWARE = re.compile(r"(?<![a-z0-9])(cpu|cu\d+|rocm\d+(\.\d+)*|xpu)(?![a-z0-9])")


def find_package(name: str, surroundings: Surroundings) -> Distribution | None:
    """Return the package that Python imports; None if it is not installed.

    It is found by its name: reading the metadata of all packages would take a second.
    """
    folders = [str(folder) for folder in surroundings.package_folders]
    return next(iter(distributions(name=name, path=folders)), None)


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: ``2.13.0a0+cpu`` is (2, 13, 0); empty if it has none."""
    try:
        return Version(version).release
    except InvalidVersion:
        return ()


def build_of_label(version: str) -> str:
    """Return the hardware that a version's local label names (``cu126``), "" if none."""
    match = _HARDWARE.search(version.partition("+")[2])
    return match[0] if match else ""


def torch_path(surroundings: Surroundings) -> Path | None:
    """Return the folder or the file that ``import torch`` would load in a script; None if there is none."""
    beside_script = surroundings.folder / "torch.py"
    if beside_script.is_file():
        return beside_script
    spec = PathFinder.find_spec("torch", [str(folder) for folder in surroundings.package_folders])
    if spec is None and surroundings.package_folders == Surroundings().package_folders:
        spec = importlib.util.find_spec("torch")  # an editable installation
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    return path.parent if path.name == "__init__.py" else path
