"""The packages that Python would find, read from their metadata without importing them."""

import importlib.util
import re
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


def copies(name: str, surroundings: Surroundings) -> list[Path]:
    """Return the places a module can be imported from, in search order."""
    places = []
    for folder in dict.fromkeys(surroundings.package_folders):
        place = importable(name, folder)
        if place is not None:
            places.append(place)
    return places


def importable(name: str, folder: Path) -> Path | None:
    """Return what ``import name`` would load from a folder: a package or a file."""
    if (folder / name / "__init__.py").is_file():
        return folder / name
    file = folder / f"{name}.py"
    return file if file.is_file() else None


def torch_folder(surroundings: Surroundings) -> Path | None:
    """Return the folder of the torch that would be imported; None if there is none."""
    places = copies("torch", surroundings)
    if places:
        return places[0]
    if surroundings.package_folders != Surroundings().package_folders:
        return None
    try:
        spec = importlib.util.find_spec("torch")  # an editable installation
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None
