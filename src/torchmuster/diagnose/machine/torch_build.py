"""The installed torch: whether it is complete, and built for this Python and these GPUs.

The checks read its files and never import it, so they also work with a broken torch.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import Distribution
from pathlib import Path

from torchmuster.devices.model import Device, DeviceKind, Node, label_all
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.machine import installed
from torchmuster.diagnose.machine.installed import release
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status
from torchmuster.launch.fingerprint import LEAST_TORCH, torch_too_old
from torchmuster.units import format_bytes

# CUDA's major version -> the oldest driver that supports it (Linux, Windows). From the release
# notes of the CUDA toolkit, table "Minimum Required Driver Version for CUDA Minor Version
# Compatibility" (docs.nvidia.com/cuda/cuda-toolkit-release-notes).
_LEAST_DRIVERS = {
    11: ("450.80.02", "452.39"),
    12: ("525.60.13", "528.33"),
    13: ("580", "580"),
}
_FIELD = re.compile(r"^(\w+)\s*(?::[^=\n]*)?=\s*['\"]([^'\"]*)['\"]", re.MULTILINE)
_VENDORS = {DeviceKind.CUDA: "NVIDIA", DeviceKind.ROCM: "AMD", DeviceKind.XPU: "Intel"}
# Desktop processors often have a small integrated GPU that is not used for training.
_STATUS = {
    DeviceKind.CUDA: Status.FAILURE,
    DeviceKind.ROCM: Status.WARNING,
    DeviceKind.XPU: Status.NOTE,
}
_INSTALLERS = {"pip", "uv"}
# One pattern over the whole file: torch's RECORD has more than 10,000 lines.
_RECORDED_LIBRARY = re.compile(
    r"^([^,\n]+\.(?:so|dll|pyd|dylib)(?:\.\d+)*),sha256=[^,\n]*,(\d+)$", re.MULTILINE
)


def least_driver(cuda: str, system: str) -> str | None:
    """Return the oldest driver that supports a CUDA version; None if unknown."""
    known = _LEAST_DRIVERS.get(release(cuda)[0]) if release(cuda) else None
    return known and known[system == "win32"]


def driver_serves(cuda: str, *, driver: str | None, serves: str | None) -> bool | None:
    """Return whether a driver is new enough for a CUDA version; None if unknown.

    ``serves`` is the newest CUDA that the driver reports. It takes precedence, because with a
    compatibility package an old driver supports more than its version number says.
    """
    wanted = release(cuda)
    if not wanted:
        return None
    if serves and release(serves):
        return release(serves)[0] >= wanted[0]
    least = least_driver(cuda, "linux")
    return release(driver) >= release(least) if driver and least else None


@dataclass(frozen=True, kw_only=True)
class Build:
    """What a torch was built for, from its version file; None for what it was not built for."""

    folder: Path
    version: str
    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None

    @property
    def kinds(self) -> tuple[DeviceKind, ...]:
        """The kinds of GPUs it supports."""
        versions = {DeviceKind.CUDA: self.cuda, DeviceKind.ROCM: self.hip, DeviceKind.XPU: self.xpu}
        return tuple(kind for kind, version in versions.items() if version)

    @property
    def words(self) -> str:
        """Display name: ``torch 2.13.0 for CUDA 12.6``."""
        known = (("CUDA", self.cuda), ("ROCm", self.hip), ("XPU", self.xpu))
        made_for = [f"{name} {version}" for name, version in known if version]
        return f"torch {self.version}" + (f" for {', '.join(made_for)}" if made_for else "")


def read_build(surroundings: Surroundings) -> Build | None:
    """Return the build that would be imported; None if it is missing or has no version file."""
    folder = installed.torch_folder(surroundings)
    try:
        text = (folder / "version.py").read_text(encoding="utf-8") if folder else ""
    except (OSError, UnicodeDecodeError):
        return None
    fields = dict(_FIELD.findall(text))
    if folder is None or "__version__" not in fields:
        return None
    return Build(
        folder=folder,
        version=fields["__version__"],
        cuda=fields.get("cuda"),
        hip=fields.get("hip"),
        xpu=fields.get("xpu"),
    )


# ---- is it complete?


def _whole(surroundings: Surroundings) -> Iterator[Finding]:
    folder = installed.torch_folder(surroundings)
    if folder is None:
        yield finding("torch-missing", python=surroundings.python)
        return
    if folder.is_file():
        moved = folder.with_name(f"my_{folder.name}")
        yield finding(
            "module-shadowed",
            folder=folder,
            quoted=shlex.quote(str(folder)),
            moved=shlex.quote(str(moved)),
        )
        return
    build = read_build(surroundings)
    troubles = list(_damage(folder, surroundings))
    if troubles or build is None:
        yield finding(
            "torch-broken",
            folder=folder,
            why=(troubles or ["it has no readable version.py, so the installation is incomplete"])[
                0
            ],
            python=surroundings.python,
            evidence="\n".join(troubles[1:5]),
        )
    elif torch_too_old(build.version):
        yield finding(
            "torch-too-old", words=build.words, least_torch=LEAST_TORCH, python=surroundings.python
        )
    else:
        yield Finding(name="torch-installed", status=Status.OK, what=build.words)


def _damage(folder: Path, surroundings: Surroundings) -> Iterator[str]:
    """Yield what is wrong with the files of an installed torch, as text."""
    engines = [path.name for path in folder.glob("_C.*") if path.suffix in (".so", ".pyd")]
    if not engines:
        yield "its compiled extension (torch/_C) is missing"
    elif not any(f"_C{suffix}" in engines for suffix in EXTENSION_SUFFIXES):
        yield (
            f"it was built for another Python or platform ({engines[0]}) than this "
            f"Python {sys.version_info.major}.{sys.version_info.minor}"
        )
    package = installed.find_package("torch", surroundings)
    if package is not None and Path(str(package.locate_file("torch"))) == folder:
        yield from _missing_files(package)


def _missing_files(package: Distribution) -> Iterator[str]:
    """Yield the libraries that are missing or too short, as after an interrupted installation."""
    if (package.read_text("INSTALLER") or "").strip() not in _INSTALLERS:
        return  # other installers change files after recording them
    for match in _RECORDED_LIBRARY.finditer(package.read_text("RECORD") or ""):
        name, size = match[1], int(match[2])
        try:
            seen = Path(str(package.locate_file(name))).stat().st_size
        except OSError:
            yield f"{name} is missing"
            continue
        if seen < size:
            yield f"{name} has {format_bytes(seen)} of {format_bytes(size)}"


# ---- is it built for these GPUs?


def _hardware(surroundings: Surroundings) -> Iterator[Finding]:
    build, node = read_build(surroundings), surroundings.look()
    if build is None:
        return  # reported by torch-whole
    kind = node.main_kind
    devices = [
        device for device in node.accelerators if device.kind is kind and device.mig_index is None
    ]
    found = list(_judge(build, kind, devices, node, surroundings))
    if not found:
        gpus = f"{label_all(devices)} can be used" if devices else "no GPU; torch uses the CPU"
        found = [Finding(name="torch-hardware", status=Status.OK, what=gpus)]
    yield from found


def _judge(
    build: Build,
    kind: DeviceKind,
    devices: Sequence[Device],
    node: Node,
    surroundings: Surroundings,
) -> Iterator[Finding]:
    if kind in _VENDORS and kind not in build.kinds:
        made_for = f"is built for {build.kinds[0]}" if build.kinds else "is built for CPUs only"
        limit = f" (up to CUDA {node.cuda_version})" if node.cuda_version else ""
        wanted = f"a build for {_VENDORS[kind]}{limit if kind is DeviceKind.CUDA else ''}"
        yield finding(
            "torch-build-without-gpu",
            status=_STATUS[kind],
            version=build.version,
            vendors=_VENDORS[kind],
            made_for=made_for,
            devices=label_all(devices),
            python=surroundings.python,
            fix=_other_build(wanted, kind, build, surroundings),
            folder=build.folder / "version.py",
        )
    elif kind is DeviceKind.CUDA and build.cuda:
        yield from _driver(build.cuda, node, surroundings)


def _other_build(wanted: str, kind: DeviceKind, build: Build, surroundings: Surroundings) -> str:
    """Return how to install a build for these GPUs: plain pip only has the NVIDIA one on Linux."""
    if kind is DeviceKind.CUDA and surroundings.system == "linux":
        unwanted = build.version.partition("+")[2] or "cpu"
        return f"{surroundings.python} -m pip install torch  # {wanted}, not +{unwanted}"
    return (
        f"then install {wanted} with the command that pytorch.org shows under “Get Started”; "
        "“pip install torch” alone installs another build"
    )


def _driver(cuda: str, node: Node, surroundings: Surroundings) -> Iterator[Finding]:
    enough = driver_serves(cuda, driver=node.driver_version, serves=node.cuda_version)
    if enough is None or node.driver_version is None:
        return
    least = least_driver(cuda, surroundings.system)
    serves = f", which supports CUDA up to {node.cuda_version}" if node.cuda_version else ""
    if not enough:
        older = f"{node.cuda_version or 'the version of the driver'}"
        yield finding(
            "driver-too-old",
            driver_version=node.driver_version,
            cuda=cuda,
            least=least,
            serves=serves,
            older=older,
        )


CHECKS = (
    Check(
        name="torch-whole",
        asks="Is torch installed, complete, and built for this Python?",
        run=_whole,
    ),
    Check(
        name="torch-hardware",
        asks="Can this torch use the GPUs of this host and their driver?",
        run=_hardware,
    ),
)
