"""The torch that is installed: whether it is whole, and made for this Python and these GPUs.

It is read from its files and never imported, so that a broken one can be told from a good one.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from torchmuster.devices.model import Device, Kind, Node, label_all
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.machine import cuda_versions, installed
from torchmuster.diagnose.machine.installed import Package
from torchmuster.finding import Finding, Status
from torchmuster.launch.fingerprint import LEAST_TORCH, torch_too_old
from torchmuster.units import format_bytes

_FIELD = re.compile(r"^(\w+)\s*(?::[^=\n]*)?=\s*['\"]([^'\"]*)['\"]", re.MULTILINE)
_VENDORS = {Kind.CUDA: "NVIDIA", Kind.ROCM: "AMD", Kind.XPU: "Intel"}
# A desktop's processor often has a small GPU beside it that nobody means to train on.
_STATUS = {Kind.CUDA: Status.FAILURE, Kind.ROCM: Status.WARNING, Kind.XPU: Status.NOTE}
_INSTALLERS = {"pip", "uv"}


@dataclass(frozen=True, kw_only=True)
class Build:
    """What a torch was built for, by its own version file; None for what it was not built for."""

    folder: Path
    version: str
    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of GPUs it can use."""
        versions = {Kind.CUDA: self.cuda, Kind.ROCM: self.hip, Kind.XPU: self.xpu}
        return tuple(kind for kind, version in versions.items() if version)

    @property
    def words(self) -> str:
        """What to call it."""
        known = (("CUDA", self.cuda), ("ROCm", self.hip), ("XPU", self.xpu))
        made_for = [f"{name} {version}" for name, version in known if version]
        return f"torch {self.version}" + (f" for {', '.join(made_for)}" if made_for else "")


def read_build(surroundings: Surroundings) -> Build | None:
    """Return the build that would be imported; None if there is none, or not even its version."""
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


# ---- is it whole?


def _whole(surroundings: Surroundings) -> Iterator[Finding]:
    folder = installed.torch_folder(surroundings)
    if folder is None:
        yield Finding(
            name="torch-missing",
            status=Status.FAILURE,
            what="torch is not installed",
            why=f"{surroundings.python} does not find it",
            fix=f"{surroundings.python} -m pip install torch",
        )
        return
    if folder.is_file():
        moved = folder.with_name(f"my_{folder.name}")
        yield Finding(
            name="module-shadowed",
            status=Status.FAILURE,
            what=f"{folder} stands in the way of torch",
            why="it is a file of that name, and Python looks there first",
            fix=f"mv {shlex.quote(str(folder))} {shlex.quote(str(moved))}",
        )
        return
    build = read_build(surroundings)
    troubles = list(_damage(folder, surroundings))
    if troubles or build is None:
        yield Finding(
            name="torch-broken",
            status=Status.FAILURE,
            what=f"the torch in {folder} cannot be imported",
            why=(troubles or ["it has no readable version.py, so it is not a whole torch"])[0],
            fix=f"{surroundings.python} -m pip install --force-reinstall torch",
            evidence="\n".join(troubles[1:5]),
        )
    elif torch_too_old(build.version):
        yield Finding(
            name="torch-too-old",
            status=Status.FAILURE,
            what=f"{build.words} is older than {LEAST_TORCH}",
            why="torchmuster uses parts of torch that older versions do not have",
            fix=f"{surroundings.python} -m pip install 'torch>={LEAST_TORCH}'",
        )
    else:
        yield Finding(name="torch-installed", status=Status.OK, what=build.words)


def _damage(folder: Path, surroundings: Surroundings) -> Iterator[str]:
    """Yield what is missing of an installed torch, in words."""
    engines = [path.name for path in folder.glob("_C.*") if path.suffix in (".so", ".pyd")]
    if not engines:
        yield "its compiled part (torch/_C) is not there"
    elif not any(f"_C{suffix}" in engines for suffix in EXTENSION_SUFFIXES):
        yield (
            f"it was built for another Python or another kind of machine ({engines[0]}) than this "
            f"Python {sys.version_info.major}.{sys.version_info.minor}"
        )
    package = installed.first("torch", installed.packages(surroundings))
    if package is not None and package.folder == folder.parent:
        yield from _missing_files(package)


def _missing_files(package: Package) -> Iterator[str]:
    """Yield the libraries that are not there or too short, as after an installation that broke off."""
    try:
        installer = (package.metadata / "INSTALLER").read_text(encoding="utf-8").strip()
    except OSError:
        return
    if installer not in _INSTALLERS:
        return  # others change the files after they have written them down
    for name, size in package.libraries():
        try:
            seen = (package.folder / name).stat().st_size
        except OSError:
            yield f"{name} is missing"
            continue
        if seen < size:
            yield f"{name} has {format_bytes(seen)} of {format_bytes(size)}"


# ---- is it made for these GPUs?


def _hardware(surroundings: Surroundings) -> Iterator[Finding]:
    build, node = read_build(surroundings), surroundings.look()
    if build is None:
        return  # said already
    kind = node.main_kind
    devices = [one for one in node.accelerators if one.kind is kind and one.mig_index is None]
    found = list(_judge(build, kind, devices, node, surroundings))
    if not found:
        gpus = f"{label_all(devices)} can be used" if devices else "no GPU here; it uses the CPU"
        found = [Finding(name="torch-hardware", status=Status.OK, what=gpus)]
    yield from found


def _judge(
    build: Build, kind: Kind, devices: Sequence[Device], node: Node, surroundings: Surroundings
) -> Iterator[Finding]:
    if kind in _VENDORS and kind not in build.kinds:
        made_for = f"is built for {build.kinds[0]}" if build.kinds else "is built for CPUs only"
        limit = f" (up to CUDA {node.cuda_version})" if node.cuda_version else ""
        wanted = f"a build for {_VENDORS[kind]}{limit if kind is Kind.CUDA else ''}"
        yield Finding(
            name="torch-build-without-gpu",
            status=_STATUS[kind],
            what=f"torch {build.version} cannot use the {_VENDORS[kind]} GPUs of this machine",
            why=f"it {made_for}; {label_all(devices)} would stay idle, and a script that asks for them fails",
            fix=f"{surroundings.python} -m pip uninstall -y torch\n"
            + _other_build(wanted, kind, build, surroundings),
            evidence=f"{build.folder / 'version.py'}: {build.version}",
        )
    elif kind is Kind.CUDA and build.cuda:
        yield from _driver(build.cuda, node, surroundings)
        yield from _too_old_or_new(build.cuda, devices)


def _other_build(wanted: str, kind: Kind, build: Build, surroundings: Surroundings) -> str:
    """Say how to install a build for these GPUs: pip by itself has only that for NVIDIA on Linux."""
    if kind is Kind.CUDA and surroundings.system == "linux":
        unwanted = installed.label(build.version) or "cpu"
        return f"{surroundings.python} -m pip install torch  # {wanted}, not +{unwanted}"
    return (
        f"then install {wanted} with the command that pytorch.org shows under “Get Started”; "
        "“pip install torch” alone gives another one"
    )


def _driver(cuda: str, node: Node, surroundings: Surroundings) -> Iterator[Finding]:
    enough = cuda_versions.driver_serves(cuda, driver=node.driver_version, serves=node.cuda_version)
    if enough is None or node.driver_version is None:
        return
    least = cuda_versions.least_driver(cuda, surroundings.system)
    serves = f", which serves CUDA up to {node.cuda_version}" if node.cuda_version else ""
    if not enough:
        older = f"{node.cuda_version or 'what the driver has'}"
        yield Finding(
            name="driver-too-old",
            status=Status.FAILURE,
            what=f"the NVIDIA driver {node.driver_version} is too old for this torch",
            why=f"torch is built for CUDA {cuda} and needs driver {least} or newer; here is "
            f"{node.driver_version}{serves}",
            fix=f"install the NVIDIA driver {least} or newer and reboot\n"
            f"or take a torch that is built for CUDA {older} or older",
        )
    elif node.cuda_version and installed.release(node.cuda_version) < installed.release(cuda)[:2]:
        yield Finding(
            name="driver-older-than-torch",
            status=Status.NOTE,
            what=f"the NVIDIA driver {node.driver_version} is older than the CUDA {cuda} of this torch",
            why=f"it serves CUDA up to {node.cuda_version}; that works within a major version, except "
            "for code that is compiled at run time to PTX",
        )


def _too_old_or_new(cuda: str, devices: Sequence[Device]) -> Iterator[Finding]:
    for device in devices:
        if device.compute_capability is None:
            continue
        why = cuda_versions.why_no_code_for(device.compute_capability, cuda)
        if why:
            yield Finding(
                name="gpu-not-in-build",
                status=Status.FAILURE,
                what=f"this torch has no code for {device.label} ({device.name})",
                why=f"{why}; a kernel there ends with “no kernel image is available for execution”",
                fix=f"take a torch that is built for it, or leave {device.label} out: "
                "muster gpus pick --gpu-ids …",
            )


CHECKS = (
    Check(
        name="torch-whole",
        asks="Is torch installed, whole, and made for this Python?",
        run=_whole,
    ),
    Check(
        name="torch-hardware",
        asks="Can this torch use the GPUs of this machine and their driver?",
        run=_hardware,
    ),
)
