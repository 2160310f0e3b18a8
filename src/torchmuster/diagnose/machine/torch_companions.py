"""Packages that must match the installed torch: compiled extensions and CUDA libraries."""

import platform
import re
from collections.abc import Iterator, Sequence

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.machine import installed
from torchmuster.diagnose.machine.installed import Package
from torchmuster.finding import Finding, Status

# Packages with code that is compiled against one release of torch.
_COMPANIONS = ("torchvision", "torchaudio", "torchtext", "xformers")


def _companions(surroundings: Surroundings) -> Iterator[Finding]:
    found = installed.packages(surroundings)
    torch = installed.first_installed("torch", found)
    if torch is None:
        return
    seen = [one for name in _COMPANIONS if (one := installed.first_installed(name, found))]
    troubles = [
        *(trouble for one in seen for trouble in _companion(one, torch, surroundings)),
        *_nvidia_wheels(torch, found, surroundings),
    ]
    if not troubles:
        words = ", ".join(f"{one.name} {one.version}" for one in seen) or "none installed"
        troubles = [Finding(name="torch-companions", status=Status.OK, what=words)]
    yield from troubles


def _companion(one: Package, torch: Package, surroundings: Surroundings) -> Iterator[Finding]:
    pins = [need.pinned for need in one.requirements() if need.name == "torch" and need.pinned]
    built_for, built = (
        installed.build_of_label(one.version),
        installed.build_of_label(torch.version),
    )
    if pins and pins[0] and installed.release(pins[0]) != torch.release:
        why = f"{one.name} {one.version} is compiled for torch {pins[0]}"
    elif built_for and built and built_for != built:
        why = f"{one.name} is built for {built_for}, torch for {built}"
    else:
        return
    yield Finding(
        name="torch-companion-mismatch",
        status=Status.WARNING,
        what=f"{one.name} {one.version} does not match torch {torch.version}",
        why=f"{why}; importing it fails, often with “operator {one.name}::… does not exist” or "
        "“undefined symbol”",
        fix=_fitting(one, torch, surroundings),
    )


def _fitting(one: Package, torch: Package, surroundings: Surroundings) -> str:
    """Return how to install a matching package; pip does not find local labels (+…)."""
    version, built = torch.version.partition("+")[0], installed.build_of_label(torch.version)
    if installed.local_label(torch.version) != built:
        return f"install {one.name} from the same source as torch {torch.version}, or build it against this torch"
    where = f"  # both built for {built}, from the index of this torch" if built else ""
    install = f"{surroundings.python} -m pip install --force-reinstall"
    return f"{install} {one.name} torch=={version}{where}"


def _nvidia_wheels(
    torch: Package, found: Sequence[Package], surroundings: Surroundings
) -> Iterator[Finding]:
    """Compare the CUDA libraries that this torch requires with the installed ones."""
    if surroundings.system != "linux":
        return
    pins = {
        need.name: need.pinned
        for need in torch.requirements()
        if need.pinned and need.name.startswith("nvidia-") and _holds_here(need.marker)
    }
    missing = [name for name in pins if installed.first_installed(name, found) is None]
    if missing:
        wanted = " ".join(f"{name}=={pins[name]}" for name in missing)
        yield Finding(
            name="cuda-libraries-missing",
            status=Status.FAILURE,
            what=f"CUDA libraries of torch are not installed: {', '.join(missing)}",
            why="importing torch fails with “cannot open shared object file”",
            fix=f"{surroundings.python} -m pip install {wanted}",
        )
    for name, pin in pins.items():
        one = installed.first_installed(name, found)
        if one is not None and one.version != pin:
            # NCCL's interface is stable, and a newer version is a common workaround.
            nccl = name.startswith("nvidia-nccl") and one.release > installed.release(pin)
            yield Finding(
                name="cuda-library-version",
                status=Status.NOTE if nccl else Status.WARNING,
                what=f"{name} is {one.version}, but torch {torch.version} was built with {pin}",
                why="another version may lack functions that torch calls, or compute differently",
                fix=f"{surroundings.python} -m pip install {name}=={pin}",
            )


def _holds_here(marker: str) -> bool:
    """Return whether a requirement's marker applies to this platform."""
    named = re.findall(r"platform_machine\s*==\s*['\"](\w+)['\"]", marker)
    return (not named or platform.machine() in named) and (
        "platform_system" not in marker or "Linux" in marker
    )


CHECKS = (
    Check(
        name="torch-companions",
        asks="Do torchvision, torchaudio and the CUDA libraries match this torch?",
        run=_companions,
    ),
)
