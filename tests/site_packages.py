"""Folders of installed packages that are not: what checks read of them, and nothing else."""

from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from device_strategies import node
from torchmuster.devices.model import Node
from torchmuster.diagnose.check import Surroundings

ENGINE = f"torch/_C{EXTENSION_SUFFIXES[0]}"


class SitePackages:
    """A site-packages folder to put packages into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        name: str,
        version: str,
        *,
        requires: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
        installer: str = "pip",
    ) -> Path:
        """Install a package; its files are written down as an installer does. Returns its metadata."""
        metadata = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {one}" for one in requires]
        metadata.joinpath("METADATA").write_text("\n".join(lines) + "\n\nRequires-Dist: a lie\n")
        metadata.joinpath("INSTALLER").write_text(f"{installer}\n")
        record = []
        for path, text in (files or {}).items():
            self.folder.joinpath(path).parent.mkdir(parents=True, exist_ok=True)
            self.folder.joinpath(path).write_text(text)
            record.append(f"{path},sha256=x,{len(text)}")
        metadata.joinpath("RECORD").write_text("\n".join(record))
        return metadata

    def torch(
        self,
        version: str = "2.13.0",
        *,
        cuda: str | None = None,
        hip: str | None = None,
        engine: str = ENGINE,
        requires: Sequence[str] = (),
    ) -> Path:
        """Install a torch. Returns its folder."""
        text = (
            f"__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\n"
            f"hip: Optional[str] = {hip!r}\nxpu: Optional[str] = None\n"
        )
        files = {"torch/__init__.py": "", "torch/version.py": text, engine: "engine"}
        files["torch/lib/libtorch_cpu.so"] = "library"
        self.add("torch", version, requires=requires, files=files)
        return self.folder / "torch"


def surroundings(
    *site_packages: SitePackages, on: Node | None = None, **fields: Any
) -> Surroundings:
    """A machine with these packages, without GPUs unless told otherwise."""
    usual: dict[str, Any] = {
        "system": "linux",
        "python": "/opt/python",
        "environment": {},
        "folder": Path("/nowhere"),
        "package_folders": tuple(one.folder for one in site_packages),
        "take_snapshot": lambda: on or node(),
    }
    return Surroundings(**{**usual, **fields})
