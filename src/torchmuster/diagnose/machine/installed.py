"""The packages that Python would find, read from their folders: nothing is imported."""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.diagnose.check import Surroundings

Version = tuple[int, ...]
# One pattern over the whole file: torch's has more than ten thousand lines.
_RECORDED_LIBRARY = re.compile(
    r"^([^,\n]+\.(?:so|dll|pyd|dylib)(?:\.\d+)*),sha256=[^,\n]*,(\d+)$", re.MULTILINE
)

# Others put what they like there: NVIDIA's containers have 2.6.0a0+ecf3bae40a.nv25.01.
_HARDWARE = re.compile(r"(?<![a-z0-9])(cpu|cu\d+|rocm\d+(\.\d+)*|xpu)(?![a-z0-9])")


@dataclass(frozen=True, kw_only=True)
class Package:
    """An installed package as its metadata has it; ``name`` is normalised (``nvidia-nccl-cu12``)."""

    name: str
    version: str
    metadata: Path  # the .dist-info folder

    @property
    def folder(self) -> Path:
        """Where it is installed."""
        return self.metadata.parent

    @property
    def release(self) -> Version:
        """The version as numbers, without what was added by who built it: ``2.13.0+cpu``."""
        return release(self.version)

    def requirements(self) -> Iterator["Requirement"]:
        """Yield what it needs for itself, without its extras."""
        for line in _header(self.metadata / "METADATA"):
            field, _, value = line.partition(": ")
            text, _, marker = value.partition(";")
            match = re.match(r"\s*([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*\(?([^)]*)", text)
            if field == "Requires-Dist" and match and "extra" not in marker:
                yield Requirement(
                    name=normalised(match[1]), bounds=match[2].strip(), marker=marker.strip()
                )

    def libraries(self) -> Iterator[tuple[str, int]]:
        """Yield the compiled files it was installed with, each with the size it should have."""
        for match in _RECORDED_LIBRARY.finditer(_installed_text(self.metadata / "RECORD") or ""):
            yield match[1], int(match[2])


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """What a package says that it needs: ``numpy``, ``<2,>=1.21``, and where (``marker``)."""

    name: str
    bounds: str
    marker: str = ""

    @property
    def pinned(self) -> str | None:
        """The one version that will do, if it names one."""
        match = re.fullmatch(r"==\s*([^,*\s]+)", self.bounds)
        return match[1] if match else None

    @property
    def below(self) -> Version | None:
        """The version below which it must be, if it says so."""
        match = re.search(r"<\s*(\d[\d.]*)", self.bounds)
        return release(match[1]) if match else None


def release(version: str) -> Version:
    """Return the numbers at the beginning of a version: ``2.13.0a0+cpu`` is (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def local_label(version: str) -> str:
    """Return who a version was built for: ``cpu`` in ``2.13.0+cpu``, nothing if it does not say."""
    return version.partition("+")[2]


def build_of_label(version: str) -> str:
    """Return what hardware a version's label names (``cu126``), nothing if it names none."""
    match = _HARDWARE.search(local_label(version))
    return match[0] if match else ""


def normalised(name: str) -> str:
    """Return a package's name as all its spellings have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def packages(surroundings: Surroundings) -> list[Package]:
    """Return every installed package; of several of one name, the one that is found first leads."""
    found = []
    for folder in dict.fromkeys(surroundings.package_folders):
        for entry in _entries(folder):
            match = re.fullmatch(r"(.+?)-([^-]+)\.dist-info", entry)
            if match:
                name = normalised(match[1])
                found.append(Package(name=name, version=match[2], metadata=folder / entry))
    return found


def first_installed(name: str, found: Sequence[Package]) -> Package | None:
    """Return the package of this name that Python takes."""
    return next((one for one in found if one.name == name), None)


def copies(name: str, surroundings: Surroundings) -> list[Path]:
    """Return where a module can be imported from, the place that Python takes first."""
    folders = dict.fromkeys(surroundings.package_folders)
    return [found for folder in folders if (found := importable(name, folder)) is not None]


def importable(name: str, folder: Path) -> Path | None:
    """Return what ``import name`` would take from a folder: a package or a file."""
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
        spec = importlib.util.find_spec("torch")  # as developers of torch install it
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:  # a folder that is not there, a zip file
        return []


def _header(path: Path) -> list[str]:
    """Return the fields of a metadata file; the description that follows may be long."""
    return (_installed_text(path) or "").partition("\n\n")[0].splitlines()


def _installed_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
