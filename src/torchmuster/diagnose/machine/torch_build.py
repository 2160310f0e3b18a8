"""The installed torch: whether it is complete, and built for this Python and these GPUs.

The checks read its files and never import it, so they also work with a broken torch.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from torchmuster.devices.model import Device, DeviceKind, label_all
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.machine.installed import release, torch_path
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status
from torchmuster.launch.fingerprint import LEAST_TORCH, torch_too_old

_FIELD = re.compile(r"^(\w+)\s*(?::[^=\n]*)?=\s*['\"]([^'\"]*)['\"]", re.MULTILINE)
_VENDORS = {DeviceKind.CUDA: "NVIDIA", DeviceKind.ROCM: "AMD", DeviceKind.XPU: "Intel"}
# The name of each version in torch's version file.
_FIELDS = {DeviceKind.CUDA: "cuda", DeviceKind.ROCM: "hip", DeviceKind.XPU: "xpu"}
# Desktop processors often have a small integrated GPU that is not used for training.
_STATUS = {
    DeviceKind.CUDA: Status.FAILURE,
    DeviceKind.ROCM: Status.WARNING,
    DeviceKind.XPU: Status.NOTE,
}


@dataclass(frozen=True, kw_only=True)
class Build:
    """What a torch was built for, from its version file: ``kinds`` has a version for each kind of GPU."""

    folder: Path
    version: str
    kinds: dict[DeviceKind, str]

    @property
    def name(self) -> str:
        """Display name: ``torch 2.13.0 for cuda 12.6``."""
        made_for = [f"{kind} {version}" for kind, version in self.kinds.items()]
        return f"torch {self.version} for {', '.join(made_for) or 'CPUs only'}"


def read_build(folder: Path) -> Build | None:
    """Return what a torch was built for; None if it has no readable version file."""
    try:
        fields = dict(_FIELD.findall((folder / "version.py").read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return None
    kinds = {kind: fields[field] for kind, field in _FIELDS.items() if field in fields}
    if "__version__" not in fields:
        return None
    return Build(folder=folder, version=fields["__version__"], kinds=kinds)


def _whole(surroundings: Surroundings) -> Iterator[Finding]:
    folder, python = torch_path(surroundings), surroundings.python
    if folder is None:
        yield finding("torch-missing", python=python)
    elif folder.is_file():
        yield finding("module-shadowed", path=folder)
    else:
        build = read_build(folder)
        damage = _damage(folder)
        if damage or build is None:
            why = damage or "it has no readable version.py: the installation is incomplete"
            yield finding("torch-broken", folder=folder, why=why, python=python)
        elif torch_too_old(build.version):
            yield finding("torch-too-old", words=build.name, least_torch=LEAST_TORCH, python=python)
        else:
            yield Finding(name="torch-installed", status=Status.OK, what=build.name)


def _damage(folder: Path) -> str:
    """Return what is wrong with the compiled extension of a torch, as text; "" if it fits."""
    engines = [path.name for path in folder.glob("_C.*") if path.suffix in (".so", ".pyd")]
    if not engines:
        return "its compiled extension (torch/_C) is missing"
    if any(f"_C{suffix}" in engines for suffix in EXTENSION_SUFFIXES):
        return ""
    here = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    return f"it was built for another Python or platform ({engines[0]}) than this {here}"


def _hardware(surroundings: Surroundings) -> Iterator[Finding]:
    folder, node = torch_path(surroundings), surroundings.take_snapshot()
    build = read_build(folder) if folder is not None else None
    kind = node.main_kind
    if build is None or kind not in _VENDORS:
        return  # torch-whole reports a torch that is missing or broken
    devices: list[Device] = []
    for device in node.accelerators:
        if device.kind is kind and device.mig_index is None:
            devices.append(device)
    cuda, serves = build.kinds.get(DeviceKind.CUDA), node.cuda_version
    if kind not in build.kinds:
        yield finding(
            "torch-build-without-gpu",
            status=_STATUS[kind],
            version=build.version,
            vendors=_VENDORS[kind],
            made_for=build.name,
            devices=label_all(devices),
            python=surroundings.python,
            serves=serves or "the newest version",
            folder=build.folder,
        )
    elif kind is DeviceKind.CUDA and cuda and serves and release(serves)[:1] < release(cuda)[:1]:
        yield finding(
            "driver-too-old", driver_version=node.driver_version, cuda=cuda, serves=serves
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
