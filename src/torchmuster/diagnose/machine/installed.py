"""The packages that Python would find, read from their metadata without importing them."""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.diagnose.check import Surroundings

Version = tuple[int, ...]
# One pattern over the whole file: torch's RECORD has more than 10,000 lines.
_RECORDED_LIBRARY = re.compile(
    r"^([^,\n]+\.(?:so|dll|pyd|dylib)(?:\.\d+)*),sha256=[^,\n]*,(\d+)$", re.MULTILINE
)

# The label is free text: NVIDIA's containers have 2.6.0a0+ecf3bae40a.nv25.01.
_HARDWARE = re.compile(r"(?<![a-z0-9])(cpu|cu\d+|rocm\d+(\.\d+)*|xpu)(?![a-z0-9])")


@dataclass(frozen=True, kw_only=True)
class Package:
    """An installed package from its metadata; ``name`` is normalized (``nvidia-nccl-cu12``)."""

    name: str
    version: str
    metadata: Path  # the .dist-info folder

    @property
    def folder(self) -> Path:
        """Where it is installed."""
        return self.metadata.parent

    @property
    def release(self) -> Version:
        """The version as numbers, without the local label (``+cpu``)."""
        return release(self.version)

    def requirements(self) -> Iterator["Requirement"]:
        """Yield its requirements, without those of extras."""
        for line in _header(self.metadata / "METADATA"):
            field, _, value = line.partition(": ")
            text, _, marker = value.partition(";")
            match = re.match(r"\s*([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*\(?([^)]*)", text)
            if field == "Requires-Dist" and match and "extra" not in marker:
                yield Requirement(
                    name=normalized(match[1]), bounds=match[2].strip(), marker=marker.strip()
                )

    def libraries(self) -> Iterator[tuple[str, int]]:
        """Yield its compiled files with their recorded sizes."""
        for match in _RECORDED_LIBRARY.finditer(_text(self.metadata / "RECORD") or ""):
            yield match[1], int(match[2])


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A declared requirement: ``numpy``, ``<2,>=1.21``, and its environment ``marker``."""

    name: str
    bounds: str
    marker: str = ""

    @property
    def pinned(self) -> str | None:
        """The exact version it requires; None if it allows several."""
        match = re.fullmatch(r"==\s*([^,*\s]+)", self.bounds)
        return match[1] if match else None

    @property
    def below(self) -> Version | None:
        """The exclusive upper bound; None if there is none."""
        match = re.search(r"<\s*(\d[\d.]*)", self.bounds)
        return release(match[1]) if match else None


def release(version: str) -> Version:
    """Return the numbers at the beginning of a version: ``2.13.0a0+cpu`` is (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def local_label(version: str) -> str:
    """Return the local label of a version: ``cpu`` in ``2.13.0+cpu``, "" if it has none."""
    return version.partition("+")[2]


def build_of_label(version: str) -> str:
    """Return the hardware that a version's label names (``cu126``), "" if none."""
    match = _HARDWARE.search(local_label(version))
    return match[0] if match else ""


def normalized(name: str) -> str:
    """Return the normalized form of a package name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def packages(surroundings: Surroundings) -> list[Package]:
    """Return every installed package, in the order of Python's search path."""
    found = []
    for folder in dict.fromkeys(surroundings.package_folders):
        for entry in _entries(folder):
            match = re.fullmatch(r"(.+?)-([^-]+)\.dist-info", entry)
            if match:
                name = normalized(match[1])
                found.append(Package(name=name, version=match[2], metadata=folder / entry))
    return found


def first_installed(name: str, found: Sequence[Package]) -> Package | None:
    """Return the package of this name that Python imports."""
    return next((one for one in found if one.name == name), None)


def copies(name: str, surroundings: Surroundings) -> list[Path]:
    """Return the places a module can be imported from, in search order."""
    folders = dict.fromkeys(surroundings.package_folders)
    return [found for folder in folders if (found := importable(name, folder)) is not None]


def importable(name: str, folder: Path) -> Path | None:
    """Return what ``import name`` would load from a folder: a package or a file."""
    for place in (folder / name / "__init__.py", folder / f"{name}.py"):
        if place.is_file():
            return place.parent if place.name == "__init__.py" else place
    return None


def torch_folder(surroundings: Surroundings) -> Path | None:
    """Return the folder of the torch that would be imported; None if there is none."""
    found = copies("torch", surroundings)
    if found:
        return found[0]
    if surroundings.package_folders != Surroundings().package_folders:
        return None
    try:
        spec = importlib.util.find_spec("torch")  # an editable installation
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:  # a missing folder, a zip file
        return []


def _header(path: Path) -> list[str]:
    """Return the header fields of a metadata file, without the description."""
    return (_text(path) or "").partition("\n\n")[0].splitlines()


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
