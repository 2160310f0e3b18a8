"""Packages that must fit to torch: compiled extensions and NumPy."""

from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution

from packaging.requirements import Requirement

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.machine.installed import build_of_label, find_package, release
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status

# Packages with code that is compiled against one release of torch.
_COMPANIONS = ("torchvision", "torchaudio", "torchtext", "xformers")
# The first release compiled for NumPy 2: github.com/numpy/numpy/issues/26191 and the release notes
# of each. Not all older releases declare that they need NumPy 1.
_FIRST_FOR_NUMPY_2 = {
    "torch": (2, 3),
    "pandas": (2, 2, 2),
    "scipy": (1, 13),
    "scikit-learn": (1, 4, 2),
    "matplotlib": (3, 8, 4),
    "pyarrow": (16,),
}
_Packages = Mapping[str, Distribution]


def check_packages(surroundings: Surroundings) -> Iterator[Finding]:
    """Compare the versions of the installed packages."""
    packages = {}
    for name in {"torch", "numpy", *_COMPANIONS, *_FIRST_FOR_NUMPY_2}:
        package = find_package(name, surroundings)
        if package is not None:
            packages[name] = package
    pip = f"{surroundings.python} -m pip"
    yield from _companions(packages, pip)
    yield from _numpy(packages, pip)


def _pins(package: Distribution) -> dict[str, str]:
    """Return the exact versions that a package requires on this platform."""
    pins = {}
    for text in package.requires or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        for specifier in requirement.specifier:
            if specifier.operator == "==" and "*" not in specifier.version:
                pins[requirement.name] = specifier.version
    return pins


def _companions(packages: _Packages, pip: str) -> Iterator[Finding]:
    torch = packages.get("torch")
    if torch is None:
        return
    built_for = build_of_label(torch.version)
    for name in _COMPANIONS:
        package = packages.get(name)
        if package is None:
            continue
        pinned = _pins(package).get("torch", torch.version)
        hardware = build_of_label(package.version) or built_for
        if release(pinned) != release(torch.version):
            why = f"{name} {package.version} is compiled for torch {pinned}"
        elif built_for and hardware != built_for:
            why = f"{name} is built for {hardware}, torch for {built_for}"
        else:
            continue
        version = torch.version.partition("+")[0]  # pip does not find local labels (+cu126)
        yield finding(
            "torch-companion-mismatch",
            subject=name,
            version=package.version,
            torch_version=torch.version,
            why=why,
            pip=pip,
            torch_release=version,
        )


def _numpy(packages: _Packages, pip: str) -> Iterator[Finding]:
    numpy = packages.get("numpy")
    if numpy is None or release(numpy.version) < (2,):
        return
    old = []
    for name, first in _FIRST_FOR_NUMPY_2.items():
        if name in packages and release(packages[name].version) < first:
            old.append(name)
    if old:
        names = ", ".join(f"{name} {packages[name].version}" for name in old)
        yield finding(
            "numpy-abi",
            status=Status.FAILURE if "torch" in old else Status.WARNING,
            version=numpy.version,
            names=names,
            pip=pip,
            old=" ".join(old),
        )


CHECKS = (
    Check(
        name="packages",
        asks="Do NumPy and packages with compiled code match this torch?",
        run=check_packages,
    ),
)
